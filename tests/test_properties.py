"""`python -m tools.parity --properties`: every family that is shipped holds its properties, and each of
ten broken forks is seen by its own property, and by no other; the cheap ones refuse a run."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import tomli
import torch
import torch.nn.functional as F
from torch import Tensor

from configs import check
from configs.load import load_config
from configs.schema import InputError
from models import MODELS, layers, llama, lora, moe
from models.kernels.ruled_attention import ruled_attention
from tests.examples import fork
from tests.programs import PYTHON, ROOT, finished
from tests.runs import tiny_run
from tools.parity import __main__ as tool
from tools.parity import properties, proved
from tools.parity.tiny import Tiny, copy_of, shrunk
from training import sample

Patch = pytest.MonkeyPatch
# compiling costs more than all others, and no fork of the museum breaks it
QUICK = tuple(one for one in properties.TABLE if one.name != "compiled")
NUMBERS = ("max_seq_len", "query_scalar")  # of a copy; which one it is decides no branch


def configured(preset: str, *options: str) -> tuple:
    """Return the family of a preset, its Args and its adapters."""
    cfg = load_config([str(ROOT / "configs" / f"{preset}.toml"), *options], None, None)
    family = lora.adapted(MODELS[cfg.model.family], cfg.lora)
    return family, family.Args(**check.architecture(cfg.model)), cfg.lora


def tiny(preset: str, *options: str) -> Tiny:
    return copy_of(*configured(preset, *options))


def unbuilt(preset: str) -> Tiny:
    """Return the copy without its model."""
    family, args, adapters = configured(preset)
    with torch.device("meta"):
        return Tiny(family, shrunk(family, args), adapters, None, None)


# The museum: ten forks, each wrong by a line ---------------------------------------------------------


def future_token(patch: Patch) -> None:
    real = layers.FeedForward.forward

    def forward(self, x: Tensor) -> Tensor:
        out = real(self, x)
        return out + 0.1 * out.roll(-1, 1)

    patch.setattr(layers.FeedForward, "forward", forward)


def one_off_window(patch: Patch) -> None:
    real = layers.AttentionCore.forward

    def forward(self, q, k, v, documents, sinks=None) -> Tensor:
        if self.spec.window is None:
            return real(self, q, k, v, documents, sinks)
        wider = replace(self.spec, window=self.spec.window + 1)
        return ruled_attention(q, k, v, wider, documents, sinks)

    patch.setattr(layers.AttentionCore, "forward", forward)


def rope_by_local_position(patch: Patch) -> None:
    real = llama.Llama.rope

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return real(self, torch.arange(positions.shape[-1]))

    patch.setattr(llama.Llama, "rope", rope)


def leak_between_documents(patch: Patch) -> None:
    real = layers.AttentionCore.forward

    def forward(self, q, k, v, documents, sinks=None) -> Tensor:
        return real(self, q, k, v, None, sinks)

    patch.setattr(layers.AttentionCore, "forward", forward)


def cache_off_by_one(patch: Patch) -> None:
    real = sample.to_all_before

    def shifted(positions: Tensor, length: int, spec) -> Callable:
        return real((positions - 1).clamp(min=0), length, spec)

    patch.setattr(sample, "to_all_before", shifted)


def detached_router(patch: Patch) -> None:
    real = moe.Router.forward

    def forward(self, x: Tensor) -> moe.ExpertChoice:
        choice = real(self, x)
        return choice._replace(weights=choice.weights.detach())

    patch.setattr(moe.Router, "forward", forward)


def sinks_dropped(patch: Patch) -> None:
    real = layers.AttentionCore.forward

    def forward(self, q, k, v, documents, sinks=None) -> Tensor:
        return real(self, q, k, v, documents, torch.zeros_like(sinks))

    patch.setattr(layers.AttentionCore, "forward", forward)


def tied_head_copied(patch: Patch) -> None:
    real = layers.Decoder.forward

    def forward(self, x, positions, loss_head=F.linear, *rest, **more) -> Tensor:
        def on_a_copy(h: Tensor, weight: Tensor) -> Tensor:
            return loss_head(h, weight.detach().clone())

        return real(self, x, positions, on_a_copy, *rest, **more)

    patch.setattr(layers.Decoder, "forward", forward)


def norm_over_the_batch(patch: Patch) -> None:
    real = layers.FeedForward.forward

    def forward(self, x: Tensor) -> Tensor:
        return real(self, x / (1 + x.square().mean(0, keepdim=True)))

    patch.setattr(layers.FeedForward, "forward", forward)


def dropout_in_eval(patch: Patch) -> None:
    real = layers.FeedForward.forward
    patch.setattr(layers.FeedForward, "forward", lambda self, x: F.dropout(real(self, x), 0.1))


class Fork(NamedTuple):
    """seen_by: the property; at: the module that it names."""

    breaks: Callable[[Patch], None]
    seen_by: str
    at: str
    preset: str = "llama_debug"


MUSEUM = (
    Fork(future_token, "causality", "layers.0.feed_forward"),
    Fork(one_off_window, "attention", "layers.0.attention.core", "gpt_oss_debug"),
    Fork(rope_by_local_position, "cache", "layers.0.attention"),
    Fork(leak_between_documents, "isolation", "layers.0.attention.core"),
    Fork(cache_off_by_one, "cache", "layers.0.attention"),
    Fork(detached_router, "gradients", "layers.1.feed_forward.router", "qwen3_moe_debug"),
    Fork(sinks_dropped, "attention", "layers.0.attention.core", "gpt_oss_debug"),
    Fork(tied_head_copied, "gradients", "tok_embeddings", "qwen3_0.6b"),
    Fork(norm_over_the_batch, "rows", "layers.0.feed_forward.w1"),
    Fork(dropout_in_eval, "repeats", "layers.0.feed_forward"),
)


def failures(of: Tiny, table: Sequence[properties.Property] = QUICK) -> dict[str, str]:
    verdicts = properties.tried(of, table)
    return {verdict.of.name: verdict.failure for verdict in verdicts if verdict.failure}


@pytest.mark.parametrize("family", MODELS)
def test_what_is_shipped_is_noted_as_proved(family: str) -> None:
    """Otherwise the first run of everybody proves it again: `python -m tools.parity.proved`."""
    assert proved.recorded(proved.SHIPPED)[family] == proved.digest(family)


@pytest.mark.parametrize("table", ["initial_values", "decay", "matrices"])
def test_a_row_after_one_that_matches_every_parameter_is_seen(table: str) -> None:
    of = tiny("llama_debug")
    rows, mine = getattr(of.family, table), ("*.mine.weight", False)
    longer = (lambda args: [*rows(args), mine]) if callable(rows) else [*rows, mine]
    late = replace(of, family=replace(of.family, **{table: longer}))
    assert properties.declared.covers_all(of) is None
    assert properties.declared.covers_all(late) == (
        f'Family.{table}: the row "*" matches every parameter before "*.mine.weight" can'
    )


@pytest.mark.parametrize("broken", MUSEUM, ids=lambda broken: broken.breaks.__name__)
def test_a_broken_fork_is_seen_by_its_own_property(broken: Fork, monkeypatch: Patch) -> None:
    broken.breaks(monkeypatch)
    found = failures(tiny(broken.preset))
    assert list(found) == [broken.seen_by], found
    assert found[broken.seen_by].startswith(broken.at), found


def test_the_tool_prints_a_line_each_and_its_exit_code_is_the_verdict(
    monkeypatch: Patch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "verdicts.json"
    preset = str(ROOT / "configs" / "llama_debug.toml")
    command = [preset, "--properties", "--json", str(file)]
    assert tool.main(command) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == ("properties of llama, on a copy of 2 layers of width 32 in float64:")
    assert [line.split()[:2] for line in lines] == [[p.name, "holds"] for p in properties.TABLE]
    written = json.loads(file.read_text())
    seen = [(row["property"], row["holds"]) for row in written["properties"]]
    assert seen == [(p.name, True) for p in properties.TABLE] and written["meshes"] == []
    dropout_in_eval(monkeypatch)
    assert tool.main(command) == 1
    said = capsys.readouterr().out
    assert "repeats       FAILS     layers.0.feed_forward returns other numbers" in said
    assert "cache         not tried it rests on repeats" in said


@pytest.mark.slow
def test_float32_inside_is_named_and_compared_less_closely(monkeypatch: Patch) -> None:
    real = layers.FeedForward.forward

    def forward(self, x: Tensor) -> Tensor:
        return real(self, x).float().type_as(x)

    monkeypatch.setattr(layers.FeedForward, "forward", forward)
    rounded = tiny("llama_debug")
    assert rounded.narrow == "layers.0.feed_forward"
    assert failures(rounded) == {}
    detached_head = tiny("qwen3_0.6b")
    tied_head_copied(monkeypatch)
    assert list(failures(detached_head)) == ["gradients"]


@pytest.mark.slow
def test_a_copy_has_the_kinds_of_layers_that_the_model_has() -> None:
    dense = tiny("deepseek_v3_debug", "--model.n_dense_layers=5")
    assert (dense.args.n_layers, dense.args.n_dense_layers) == (2, 2)
    assert failures(dense) == {}


# At the start of a run -------------------------------------------------------------------------------


def proved_at_start(preset: str) -> list[str]:
    return proved.prove(*configured(preset), masks_documents=True)


def test_a_start_refuses_a_wrong_model_by_property_and_module(monkeypatch: Patch) -> None:
    cheap = [one.name for one in properties.AT_START]
    assert proved_at_start("llama_debug") == cheap
    future_token(monkeypatch)
    said = r"the model is wrong \(causality\): layers\.0\.feed_forward \(by .*debug\.self_check = false"
    with pytest.raises(InputError, match=said):
        proved_at_start("llama_debug")


def test_a_family_is_proved_again_when_one_of_its_files_changes(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    shutil.copytree(ROOT / "models", folder, ignore=shutil.ignore_patterns("__pycache__"))

    def changed_by(name: str) -> set[str]:
        before = {family: proved.digest(family, folder) for family in MODELS}
        path = folder / name
        path.write_text(path.read_text() + "\n# another line\n")
        return {family for family in MODELS if proved.digest(family, folder) != before[family]}

    assert changed_by("qwen3.py") == changed_by("flavors/qwen3.py") == {"qwen3"}
    assert changed_by("formats/qwen3.py") == set()
    assert changed_by("gemma3.py") == {"gemma2", "gemma3"}  # whose blocks it has
    assert changed_by("layers.py") == changed_by("kernels/cpu/causal_attention.py") == set(MODELS)


@pytest.mark.slow
@pytest.mark.cap(240)
def test_a_run_of_a_changed_family_proves_it_once(tmp_path: Path) -> None:
    tree = fork(tmp_path)
    options = [*tiny_run(tmp_path), f"--run.folder={tmp_path / 'run'}", "--training.steps=4"]
    path = tree / "models" / "layers.py"
    right = path.read_text()
    result = "return h + self.feed_forward(self.ffn_norm(h))"
    assert right.count(result) == 1
    noted = tmp_path / "run" / proved.IN_RUN

    def start() -> tuple[int, str]:
        done = finished(PYTHON, "train.py", *options, cwd=tree, seconds=200)
        return done.returncode, done.stdout + done.stderr

    path.write_text(right.replace(result, result + " + 0.1 * h.roll(-1, 1)"))
    code, said = start()
    assert code == 2 and "the model is wrong (causality): layers.0 (by" in said, said
    assert not noted.exists()
    path.write_text(right + "\n# another line\n")
    code, said = start()
    assert code == 0 and "hold: repeats, causality, rows, attention, gradients (" in said, said
    assert json.loads(noted.read_text()).keys() == {"llama"}


def branches(value: object) -> object:
    """Return what of an option of a copy decides a branch: of a fraction, whether it is 0."""
    if isinstance(value, dict):
        return {
            name: bool(one) if name in NUMBERS else branches(one) for name, one in value.items()
        }
    return bool(value) if isinstance(value, float) else value


def presets_of(family: str) -> list[str]:
    """Return the presets of a family, small ones first."""
    found = []
    for path in sorted((ROOT / "configs").glob("*.toml")):
        model = tomli.loads(path.read_text(encoding="utf-8")).get("model", {})
        if model.get("family", "llama") == family:
            found.append(path.stem)
    return sorted(found, key=lambda preset: "debug" not in preset)


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("family", [name for name in MODELS if name != "qwen3_5"])  # without one
def test_every_preset_holds_its_properties(family: str) -> None:
    """Tried is the first of those whose copies have the same modules and branches."""
    tried: list[tuple] = []
    for preset in presets_of(family):
        copy = unbuilt(preset)
        kind = copy.lora, branches(asdict(copy.args))
        if kind in tried:
            continue
        tried.append(kind)
        table = properties.TABLE if "debug" in preset else QUICK
        assert failures(tiny(preset), table) == {}, preset
    assert tried


def test_control_a_tied_output_decides_a_branch() -> None:
    tied, untied = (branches(asdict(unbuilt(name).args)) for name in ("llama_1b", "llama_8b"))
    assert tied != untied


# Layers without attention -----------------------------------------------------------------------


class TokenShift(torch.nn.Module):
    """A mixer that adds the token before, whichever document that is of."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: object = None) -> Tensor:
        return F.pad(x, (0, 0, 1, 0))[:, :-1]


def with_a_token_shift() -> Tiny:
    copy = tiny("llama_debug")
    copy.model.layers["0"].attention = TokenShift()
    return copy


def isolation_of(copy: Tiny) -> properties.PropertyResult:
    one = next(one for one in properties.TABLE if one.name == "isolation")
    return properties.verdict_on(one, copy)


def test_isolation_is_not_asked_of_a_layer_that_runs_with_masks_refuse() -> None:
    verdict = isolation_of(with_a_token_shift())
    assert not verdict.failure and "layers.0.attention (TokenShift)" in verdict.left_out


def test_a_layer_that_says_that_it_keeps_documents_apart_is_asked(monkeypatch: Patch) -> None:
    monkeypatch.setattr(TokenShift, "separates_documents", True, raising=False)
    assert "layers.0.attention" in isolation_of(with_a_token_shift()).failure
