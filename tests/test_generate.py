"""Sampling with the cache of keys and values gives the tokens that it gives without, and text comes
out as valid UTF-8."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import train
from checkpoint import verify
from configs.load import load_config
from configs.schema import InputError
from data import hf_tokenizer
from data import show as show_row
from data.tokenizer import byte_tokenizer
from models import MODELS
from parallelisms.mesh import world
from tests.checkpoints import generated
from tests.library import added, byte_fallback, unigram
from tests.published import published
from tests.ranks import run_ranks
from tests.runs import COMPILED, SMALL_MODEL
from tests.shapes import DEEPSEEK, LLAMA3, SHAPES, random_pair
from tools import convert
from tools.generate import main, show
from tools.sampling import Loaded, texts_as_they_come
from training import attention
from training.sample import KeyValueCache, Sampling, sample, sample_stream

CPU = torch.device("cpu")
PROMPTS = [[7, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [250]]
LLAMA = MODELS["llama"]
SIZES = {"dim": 50, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "head_dim": 6}
SIZES |= {"hidden_dim": 44, "vocab_size": 263}
ARGS = LLAMA.Args(**LLAMA.numbers.flavors["debug"] | SIZES)


def restless(args=ARGS, family=LLAMA) -> torch.nn.Module:
    """Return a model with weights so large that every token depends on all tokens before it."""
    torch.manual_seed(5)
    model = family.build(args)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def texts(model, prompts, new_tokens, context, **options) -> list[list[int]]:
    made = [list(prompt) for prompt in prompts]
    for drawn in sample_stream(model, prompts, CPU, Sampling(new_tokens, context, **options)):
        for text, token in zip(made, drawn, strict=True):
            text.extend([] if token is None else [token])
    return made


@pytest.mark.parametrize(
    "tied, temperature, context, multiple",
    [(False, 1.5, 64, 1), (True, 1.5, 64, 4), (True, 0.0, 12, 1), (False, 1.5, 12, 3)],
)  # fmt: skip  12: texts grow beyond it
def test_the_same_tokens_as_without_the_cache(tied, temperature, context, multiple):
    model = restless(replace(ARGS, tied_embeddings=tied))
    for prompt in PROMPTS:
        options = {"temperature": temperature, "top_k": 200}
        cached = sample(model, prompt, 20, context, CPU, multiple=multiple, **options)
        assert cached == sample(model, prompt, 20, context, CPU, cache=False, **options)
        assert len(cached) == len(prompt) + 20 and len(set(cached)) > (10 if temperature else 2), (
            "a text that repeats itself would prove little"
        )


OTHER_FAMILY = 'holds a model of the family "mamba", which is not among those here: llama, qwen3'
OTHER_NUMBERS = {"model": {"dim": 8, "n_states": 16}}


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"family": "mamba"}, OTHER_FAMILY),
        ({"family": None}, "does not say which model it holds"),
        ({"must_match": {}}, "does not say which model it holds"),
        ({"must_match": OTHER_NUMBERS}, "holds a llama with other numbers than those here"),
    ],
)
def test_a_checkpoint_of_another_code_is_a_sentence(facts, words, tmp_path, monkeypatch, capsys):
    """From a fork with one more family, or with one more number: generate and convert."""
    path = tmp_path / "step-00000001"
    manifest = {"facts": {"family": "llama", "must_match": {"model": {"dim": 8}}} | facts}
    monkeypatch.setattr(verify, "newest", lambda folder: path)
    monkeypatch.setattr(verify, "read_manifest", lambda path: manifest)
    with pytest.raises(InputError) as caught:
        generated(tmp_path, "a", 3)
    assert str(caught.value).startswith(str(path)) and words in str(caught.value)
    assert convert.main(["to-hf", str(tmp_path), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err


def test_a_kernel_gets_values_as_wide_as_keys(monkeypatch):
    """Values of latent attention are narrower than keys, and some kernels of GPUs refuse them."""
    widths, real = set(), torch.nn.functional.scaled_dot_product_attention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
        widths.add((k.shape[-1], v.shape[-1]))
        return real(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    family = MODELS["deepseek_v3"]
    args = replace(family.small(16), value_dim=4)
    texts(restless(args, family), [[1, 2, 3]], 3, 8)
    assert widths == {(8, 8)}


def kernels() -> dict[str, bool]:
    """PyTorch's switches of this process: which kernels attention may use."""
    names = ("flash", "cudnn", "mem_efficient", "math")
    return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names}


@pytest.mark.parametrize("kernel, family", [("flash", "llama"), ("cudnn", "deepseek_v3")])
def test_the_kernel_of_training_does_not_end_a_run_at_its_sample(kernel, family):
    """A forward of one token has a mask, which FlashAttention does not take: "Invalid backend",
    after the last step. On a CPU the switch "cudnn" leaves no kernel at all, as "flash" does on a
    GPU for a mask. The setting holds again for who asks for tokens, and after the last one."""
    model = restless(MODELS[family].small(16), MODELS[family])
    wanted = texts(model, [[1, 2, 3]], 3, 8, temperature=0)
    before = kernels()
    try:
        attention.choose(kernel, torch.device("cuda"))
        chosen = kernels()
        assert chosen != before
        made = [1, 2, 3]
        for [token] in sample_stream(model, [made], CPU, Sampling(3, 8, temperature=0)):
            made.append(token)
            assert kernels() == chosen
        assert [made] == wanted and kernels() == chosen
    finally:
        for name, on in before.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


@pytest.mark.parametrize("shape", [*MODELS, "qwen3 experts", "deepseek_v3 lite", "olmo3 long"])
def test_every_family_can_be_sampled_with_the_cache(shape):
    """Families with experts can be sampled too, and beyond the context."""
    # logits of a tied model that scales its embedding are larger, so its samples vary less
    family, args = SHAPES[{"llama": "llama2", "gemma3": "gemma3 untied"}.get(shape, shape)]
    model = restless(args, family)
    options = (model, PROMPTS[1], 12, 18, CPU)
    cached = sample(*options, temperature=1.5)
    assert cached == sample(*options, temperature=1.5, cache=False) and len(set(cached)) > 10


def test_what_is_kept_of_a_token():
    """Keys and values of the key/value heads; of latent attention the one narrow vector that all of
    them come from."""
    for shape, numbers in (
        ("llama3", 2 * LLAMA3.n_kv_heads * LLAMA3.head_dim),
        ("deepseek_v3", DEEPSEEK.kv_rank + DEEPSEEK.rope_dim),
    ):
        family, args = SHAPES[shape]
        cache = KeyValueCache(restless(args, family), 20)
        tokens = torch.zeros(3, 7, dtype=torch.int64)
        cache.forward(tokens, torch.arange(7), torch.nn.functional.linear)
        kept = sum(x.numel() for layer in cache.kept for x in layer)
        assert kept == args.n_layers * 3 * 20 * numbers


def test_prompts_side_by_side_get_what_each_gets_alone():
    """The prompts end at different steps: a token that one of them draws is the end."""
    model = restless()
    free = [sample(model, prompt, 12, 64, CPU, temperature=1.5) for prompt in PROMPTS]
    stop = free[0][len(PROMPTS[0]) + 5]
    alone = [sample(model, prompt, 12, 64, CPU, [stop], temperature=1.5) for prompt in PROMPTS]
    assert len(alone[0]) <= len(PROMPTS[0]) + 5 and len(alone[1]) != len(alone[0])
    how = {"stops": [stop], "temperature": 1.5}
    for more in {}, {"multiple": 4}, {"cache": False}:
        assert texts(model, PROMPTS, 12, 64, **how, **more) == alone, more


def test_a_token_costs_one_position():
    model, lengths = restless(), []
    model.tok_embeddings.register_forward_pre_hook(
        lambda _, inputs: lengths.append(inputs[0].shape[1])
    )
    sample(model, PROMPTS[1], 5, 64, CPU, multiple=4)
    assert lengths == [12, 4, 4, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["positions", "mask"])
def test_control_a_wrong_cache_gives_other_tokens(fault, monkeypatch):
    model = restless()
    right = texts(model, PROMPTS, 12, 64, temperature=1.5)
    forward, rope = KeyValueCache.forward, model.rope

    def too_far(p):
        return rope(p + (p.ndim == 2) * torch.arange(3)[:, None])

    def too_long(self, t, p, *rest, **more):
        return forward(self, t, p.clamp(min=9) if p.ndim == 2 else p, *rest, **more)

    if fault == "positions":  # the rotary tables, one too far
        monkeypatch.setattr(model, "rope", too_far)
    else:  # a shorter prompt sees the tokens of a longer one in its batch
        monkeypatch.setattr(KeyValueCache, "forward", too_long)
    assert texts(model, PROMPTS, 12, 64, temperature=1.5) != right


EXPERTS = [
    "--model.family=deepseek_v3",
    "--model.n_experts=8",
    "--model.experts_per_token=3",
    "--model.expert_dim=12",
]


def sampled_on_a_mesh(options: list[str]) -> list[list[list[int]]]:
    # latent attention has no such numbers
    foreign = ("--model.n_kv_heads", "--model.head_dim") if EXPERTS[0] in options else ()
    base = [option for option in SMALL_MODEL if not option.startswith(foreign)]
    job = train.build(
        load_config([*base, "--run.device=cpu", *options], world().size, world().local_size)
    )
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.mul_(8)
    made = []
    for cache in True, False:
        rows = [list(prompt) for prompt in PROMPTS]
        how = Sampling(12, 16, temperature=1.5, multiple=job.mesh.tp, cache=cache)
        for drawn in sample_stream(job.model, PROMPTS, CPU, how):
            for text, token in zip(rows, drawn, strict=True):
                text.append(token)
        made.append(rows)
    return made


@pytest.mark.slow
def test_the_same_tokens_on_every_mesh():
    """16 tokens of context, which the second prompt outgrows; also with blocks that are compiled
    and checkpointed. On FSDP x TP: tests/test_train.py."""
    [[alone, uncached]] = run_ranks(1, sampled_on_a_mesh, [])
    assert alone == uncached and len({token for row in alone for token in row}) > 20
    for ranks, options in (
        (1, COMPILED),
        (2, ["--parallelism.tensor_parallel=2", "--activation_checkpoint.mode=full"]),
    ):
        assert run_ranks(ranks, sampled_on_a_mesh, options) == [[alone, alone]] * ranks, options


@pytest.mark.slow
def test_experts_and_latent_attention_give_the_same_tokens_on_a_mesh():
    [[alone, uncached]] = run_ranks(1, sampled_on_a_mesh, EXPERTS)
    assert alone == uncached and len({token for row in alone for token in row}) > 20
    options = [*EXPERTS, "--parallelism.tensor_parallel=2", "--parallelism.expert_parallel=2"]
    assert run_ranks(2, sampled_on_a_mesh, options) == [[alone, alone]] * 2


@pytest.mark.slow
def test_experts_and_latent_attention_give_the_tokens_of_transformers(tmp_path, capsys):
    """From the Hugging Face folder, and from the checkpoint that it was converted to."""
    pytest.importorskip("transformers")
    family, args = SHAPES["deepseek_v3"]
    theirs, _, _ = random_pair(family, replace(args, vocab_size=263))
    theirs.save_pretrained(tmp_path / "hf")
    words = byte_tokenizer()
    for name, document in hf_tokenizer.files(words, 64).items():
        (tmp_path / "hf" / name).write_text(json.dumps(document))
    assert convert.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    options = {"attention_mask": torch.ones(1, 3, dtype=torch.int64), "pad_token_id": 0}
    options |= {"eos_token_id": words.eot_id, "do_sample": False, "max_new_tokens": 20}
    want = theirs.eval().generate(torch.tensor([list(b"abc")]), **options)[0].tolist()
    assert len(set(want)) > 10
    for folder in "hf", "run":
        assert generated(tmp_path / folder, "abc", 20) == words.decode(want)
    drawn = generated(tmp_path / "run", "abc", 20, temperature=0.8, top_k=3, seed=4)
    capsys.readouterr()
    options = ["--prompt=abc", "--tokens=20", "--top-k=3", "--seed=4"]
    assert main([str(tmp_path / "run"), *options]) == 0
    assert capsys.readouterr().out == f"{drawn}\n"


def test_text_grows_by_whole_characters(capsys):
    """Random bytes, many of which are parts of characters or of none."""
    loaded = Loaded(restless(replace(ARGS, vocab_size=257)), byte_tokenizer(), 64)
    how = {"temperature": 2.0, "top_k": 257, "seed": 1}
    steps = [text for [text] in texts_as_they_come(loaded, ["é😀"], 60, **how)]
    assert "\ufffd" in steps[-1] and len(steps) > 20
    for before, after in zip(steps, steps[1:]):
        assert after.startswith(before)
    show(iter([[text] for text in steps]), 1, live=True)
    live = capsys.readouterr().out
    show(iter([[text] for text in steps]), 1, live=False)
    assert live == capsys.readouterr().out == steps[-1] + "\n"


def test_a_character_of_several_tokens_appears_once_it_is_whole():
    tokens = iter([[0xF0], [0x9F], [0x98], [0x80], [0x61]])
    loaded = Loaded(torch.nn.Identity(), byte_tokenizer(), 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.sampling.sample_stream", lambda *_, **__: tokens)
        steps = [text for [text] in texts_as_they_come(loaded, ["x"], 5)]
    assert steps == ["x", "x", "x", "x😀", "x😀a", "x😀a"]


def spaced(name, tmp_path):
    """Return a tokenizer that puts a space before a text, and takes it from one that it decodes."""
    if name == "llama2":
        return hf_tokenizer.read_file(published("llama2") / "tokenizer.json")
    document = {"byte fallback": byte_fallback, "metaspace": unigram}[name]()
    rows = [added("<unk>", 0, special=True), added("</s>", 1, special=True)]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document | {"added_tokens": rows}))
    return hf_tokenizer.read_file(path, "</s>")


@pytest.mark.parametrize("name", ["byte fallback", "metaspace", "llama2"])
def test_a_continuation_keeps_the_space_before_it(name, tmp_path, monkeypatch):
    """transformers decodes all ids at once: in a prompt and its continuation, and in a row of
    `--show`. Decoded alone, the continuation would lose the space."""
    words = spaced(name, tmp_path)
    prompt, whole = words.encode("the").tolist(), words.encode("the the").tolist()
    more = whole[len(prompt) :]
    assert whole[: len(prompt)] == prompt
    assert words.decode(whole) == "the the" != words.decode(prompt) + words.decode(more)
    tokens = [[token] for token in more]
    monkeypatch.setattr("tools.sampling.sample_stream", lambda *_, **__: iter(tokens))
    loaded = Loaded(torch.nn.Identity(), words, 64)
    assert [text for [text] in texts_as_they_come(loaded, ["the"], 5)][-1] == "the the"
    shown = {"step": 0, "row": 0, "source": "", "loss_weight": 1.0, "window": 0}
    shown |= {"names": {0: "a"}, "padding": 0}
    shown |= {"tokens": np.array(whole), "counts": np.arange(len(whole)) >= len(prompt)}
    assert show_row.as_text(shown, words, coloured=False).endswith("the[[ the]]")


@pytest.mark.parametrize("number", ["--top-k=0", "--temperature=nan", "--tokens=-5"])
def test_numbers_that_no_text_can_be_drawn_with_are_refused(number, capsys):
    assert main(["runs/nope", number]) == 2
    option, _, value = number.partition("=")
    assert f"{option}={value}: must be" in capsys.readouterr().err


def test_a_prompt_of_another_encoding_is_a_sentence(capsys):
    assert main(["runs/nope", "--prompt=\udcff"]) == 2  # as Python reads a byte that is no UTF-8
    assert "--prompt and --chat must be UTF-8" in capsys.readouterr().err
