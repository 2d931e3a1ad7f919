"""Published benchmarks: put as lm-evaluation-harness puts them, and scored as it scores them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs.schema import EvaluationTask
from data import hf_tokenizer, tasks
from data.tokenizer import byte_tokenizer
from lab.bench import tasks as bench
from tests.published import first_layers, published
from tools import benchmarks, fetch_task
from tools import evaluate as evaluate_tool
from tools.benchmarks import BENCHMARKS, SUBJECTS
from training.scores import scores

ROWS = {  # as they are published
    "hellaswag": {
        "activity_label": "Baking",
        "ctx_a": "[header] How to bake [title] Take  flour.",
        "ctx_b": "then SHE",
        "endings": [" stirs [step] it. ", "sings.", "[title] runs", "a  b"],
        "label": "1",
    },
    "arc_easy": {
        "question": "Which?",
        "choices": {"text": ["this", "that"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "arc_challenge": {
        "question": "Which one?",
        "choices": {"text": ["1", "2", "3"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
    "piqa": {"goal": "To open", "sol1": "push", "sol2": "pull", "label": 1},
    "openbookqa": {
        "question_stem": "The sun",
        "choices": {"text": ["shines", "sinks"], "label": ["A", "B"]},
        "answerKey": " A",
    },
    "sciq": {
        "support": "\n Water is wet.",
        "question": "What is wet?",
        "distractor1": "x",
        "distractor2": "y",
        "distractor3": "z",
        "correct_answer": "water",
    },
    "boolq": {"passage": "It is.", "question": "is it", "label": 1},
    "winogrande": {
        "sentence": "The cup held the ball since _ was large , not because _ fell.",
        "option1": "the cup",
        "option2": "the ball",
        "answer": "2",
    },
    "commonsense_qa": {
        "question": " Where is it? ",
        "choices": {"label": list("ABCDE"), "text": ["here", "there", "up", "in", "out"]},
        "answerKey": "D",
    },
    "social_iqa": {
        "context": "Kai ran.",
        "question": "Why?",
        "answerA": "to be fast",
        "answerB": "to be slow",
        "answerC": "fun",
        "label": "2",
    },
    "copa": {
        "premise": "The man fell. ",
        "choice1": "It was wet.",
        "choice2": "He sang.",
        "question": "cause",
        "label": 0,
    },
    "lambada_openai": {"text": "she said she would come"},
    "mmlu": {"question": " What is it? ", "choices": ["1", "2", "3", "4"], "answer": 2},
}
KEPT = ("label", "answer", "answerKey")  # columns whose text says which choice is right


@pytest.fixture(scope="module", autouse=True)
def _on_one_worker() -> None:
    """Keep the tests of this file together: to import lm-evaluation-harness takes seconds."""


def varied(row: dict, number: int) -> dict:
    """Another row of the same kind."""
    return {
        key: f"{value} {number}"
        if isinstance(value, str) and key not in KEPT and value != "cause"
        else value
        for key, value in row.items()
    }


def save_rows(name: str, folder: Path, count: int = 6, **splits: str) -> None:
    """Save rows as the folder of a benchmark, under the splits that the harness has."""
    datasets = pytest.importorskip("datasets", reason="pip install -r requirements-test.txt")
    parts = benchmarks.parts_of(name)[:3]
    for benchmark in parts:
        rows = [varied(ROWS[name], number) for number in range(count)]
        found = {
            split: datasets.Dataset.from_list(rows if split != "train" else rows[::-1])
            for split in {benchmark.split, benchmark.examples}
        }
        place = folder / benchmark.path / (benchmark.config or "none")
        datasets.DatasetDict(found).save_to_disk(str(place))


def of_harness(name: str, folder: Path, shots: int) -> list[tuple[str, str]]:
    """Return the (context, continuation) of every request of the harness."""
    [found] = bench.harness_tasks([name], folder, shots)
    leaves = found.get_all_tasks() if name == benchmarks.MMLU else [found]
    requests = []
    for task in leaves:
        task.build_all_requests(limit=None, rank=0, world_size=1)
        requests += [instance.args for instance in task.instances]
    return requests


def of_file(file: Path) -> list[tuple[str, str]]:
    """Return the same of a task's file."""
    requests = []
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if "text" in row:
            requests.append((row["context"], f" {row['text']}"))
        else:
            question = tasks.PARSERS["multiple_choice"](1, row)
            for number, choice in enumerate(question.choices):
                requests.append((question.context_of(number), f" {choice}"))
    return requests


def assert_put_as_in_the_harness(name: str, folder: Path, scratch: Path) -> None:
    for shots in (0, 3):
        out = scratch / f"{name}-{shots}.jsonl"
        assert fetch_task.main([name, str(out), f"--from={folder}", f"--shots={shots}"]) == 0
        ours = of_file(out)
        assert ours == of_harness(name, folder, shots) and ours


@pytest.mark.parametrize("name", ROWS)
def test_questions_and_examples_are_put_as_the_harness_puts_them(name, tmp_path):
    pytest.importorskip("lm_eval", reason="pip install -r requirements-test.txt")
    save_rows(name, tmp_path)
    assert_put_as_in_the_harness(name, tmp_path, tmp_path)


@pytest.mark.slow
def test_negative_control_another_space_or_another_draw_is_seen(tmp_path, monkeypatch):
    """The kinds of mistakes that scores would hide: COPA's second space, an example drawn where the
    harness draws one more."""
    pytest.importorskip("lm_eval", reason="pip install -r requirements-test.txt")
    for name, wrong in {
        "copa": lambda row: benchmarks.copa(row) | {"choices": ["it was", "he sang"]},
        "piqa": None,
    }.items():
        save_rows(name, tmp_path)
        with monkeypatch.context() as patch:
            if wrong:
                patch.setitem(BENCHMARKS, name, BENCHMARKS[name]._replace(convert=wrong))
            else:
                patch.setattr(benchmarks.Benchmark, "also_drawn", False)
            with pytest.raises(AssertionError):
                assert_put_as_in_the_harness(name, tmp_path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ROWS, *(f"mmlu_{subject}" for subject in SUBJECTS)])
def test_paths_splits_and_descriptions_are_the_harnesss(name):
    pytest.importorskip("lm_eval", reason="pip install -r requirements-test.txt")
    if name == "mmlu":
        subjects = [each for each in bench.harness_manager().all_subtasks if "mmlu_" in each]
        assert sorted(subjects) == sorted(f"mmlu_{subject}" for subject in SUBJECTS)
        return
    ours = BENCHMARKS[name]
    index = bench.harness_manager().task_index
    theirs = bench.harness_manager()._factory._load_full_config(index[name], None)
    assert theirs["dataset_path"] == ours.path and theirs.get("dataset_name") == ours.config
    split = theirs.get("test_split") or theirs["validation_split"]
    assert split == ours.split and (theirs.get("test_split") is None) == ours.also_drawn
    pool = theirs.get("fewshot_split") or theirs.get("training_split") or split
    assert pool == ours.examples and theirs.get("description", "") == ours.description


def opened(rows: list[dict], tmp_path: Path) -> tasks.EncodedTask:
    file = tmp_path / "x.jsonl"
    tasks.write(file, rows)
    return tasks.open_task(EvaluationTask(name="x", file=str(file)), byte_tokenizer(), 32)


def test_each_choice_may_have_a_context_of_its_own(tmp_path):
    rows = [{"context": ["a cat", "a dog"], "choices": ["ran", "ran"], "answer": 1}]
    task = opened(rows, tmp_path)
    assert [bytes(request.tokens) for request in task.requests] == [b"a cat ran", b"a dog ran"]
    assert [request.scored for request in task.requests] == [4, 4]


def test_the_level_of_chance_and_the_scores_of_groups(tmp_path):
    """Chance is a mean over questions, which may have other numbers of choices; the mean of groups
    is weighted by their sizes, and its error is that of the harness."""
    generator = np.random.default_rng(0)
    sizes = {"one": 5, "two": 17, "three": 40}
    rows = []
    for group, size in sizes.items():
        count = 2 if group == "one" else 4
        choices = list("abcd")[:count]
        rows += [{"context": "", "choices": choices, "answer": 0, "group": group}] * size
    task = opened(rows, tmp_path)
    found = scores(task, generator.normal(size=len(task.requests)), np.zeros(len(task.requests)))
    assert found["chance"] == pytest.approx((5 / 2 + 57 / 4) / 62)
    assert (found["one/chance"], found["two/chance"]) == (0.5, 0.25)
    of_groups = [found[f"{group}/acc"] for group in sizes]
    assert found["acc"] == pytest.approx(np.average(of_groups, weights=list(sizes.values())))
    assert found["acc"] != pytest.approx(np.mean(of_groups))
    metrics = pytest.importorskip("lm_eval.api.metrics")
    errors = [found[f"{group}/acc_stderr"] for group in sizes]
    pooled = metrics.pooled_sample_stderr(errors, list(sizes.values()))
    assert found["acc_stderr"] == pytest.approx(float(pooled))
    shown = evaluate_tool.table([{"name": "mmlu", "scores": found}]).splitlines()
    assert shown[0].split() == ["task", "score", "value", "stderr", "chance"]
    [of_one] = [line.split() for line in shown if line.startswith("mmlu/one ")]
    assert of_one == ["mmlu/one", "acc", f"{found['one/acc']:.4f}", f"{errors[0]:.4f}", "0.5000"]
    assert not any("chance" in line for line in shown[1:])


def test_perplexities_have_no_level_of_chance(tmp_path):
    tasks.write(tmp_path / "x", [{"text": "a b"}, {"context": "a", "text": "b"}])
    row = EvaluationTask(name="x", file=str(tmp_path / "x"), kind="perplexity")
    task = tasks.open_task(row, byte_tokenizer(), 32)
    found = scores(task, np.full(2, -1.0), np.zeros(2))
    assert "acc" in found and "chance" not in found
    header, *lines = evaluate_tool.table([{"name": "x", "scores": found}]).splitlines()
    assert len(header.split()) == 5 and all(len(line.split()) <= 4 for line in lines)


# --------------------------------------------------------------------------------------------------
# where rows come from


def test_rows_come_from_the_hub(tmp_path, monkeypatch, capsys):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        if path == "baber/piqa":
            raise ConnectionError("offline")
        return [ROWS[next(n for n in ROWS if BENCHMARKS[n].path == path)]] * 4

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    out = tmp_path / "x.jsonl"
    assert fetch_task.main(["arc_challenge", str(out), "--shots=2"]) == 0
    place = ("allenai/ai2_arc", "ARC-Challenge")
    assert asked == [(*place, "test"), (*place, "train")]
    shot = "Question: Which?\nAnswer: that\n\n"
    want = tasks.Question(1, f"{shot * 2}Question: Which?\nAnswer:", ["this", "that"], 1)
    row = EvaluationTask(name="x", file=str(out))
    assert tasks.read(row)[0] == want
    assert fetch_task.main(["lambada_openai", str(out)]) == 0
    row = EvaluationTask(name="x", file=str(out), kind=tasks.kind_of(str(out)))
    assert tasks.read(row)[0] == tasks.Text(1, "come", "she said she would")
    assert fetch_task.main(["piqa", str(out)]) == 2
    assert "baber/piqa cannot be loaded: offline" in capsys.readouterr().err


def test_a_folder_is_found_however_it_is_named(tmp_path, monkeypatch):
    """By the hub's path, by its last part, by the configuration, or as the split itself."""
    save_rows("boolq", tmp_path / "hub")
    inside = tmp_path / "hub" / "aps" / "super_glue"
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "super_glue").symlink_to(inside)
    monkeypatch.chdir(tmp_path)
    wanted = None
    for folder in ("hub", "short", "hub/aps/super_glue", "hub/aps/super_glue/boolq"):
        assert fetch_task.main(["boolq", f"--from={folder}"]) == 0
        found = Path("boolq.jsonl").read_text()
        wanted = wanted or found
        assert found == wanted and found.count("\n") == 6
    split = "hub/aps/super_glue/boolq/validation"
    assert fetch_task.main(["boolq", "--from", split, "--limit=2"]) == 0
    assert Path("boolq.jsonl").read_text().count("\n") == 2


def wrong_rows(name: str, folder: Path, **columns: object) -> None:
    """Save one row whose columns are others; None: without it."""
    datasets = pytest.importorskip("datasets")
    benchmark = BENCHMARKS[name]
    row = {key: value for key, value in (ROWS[name] | columns).items() if value is not None}
    place = folder / benchmark.path / (benchmark.config or "none")
    datasets.DatasetDict({benchmark.split: datasets.Dataset.from_list([row])}).save_to_disk(place)


@pytest.mark.parametrize(
    "name, columns, words",
    [
        ("hellaswag", {"label": ""}, "has no answer (label is '')"),
        ("piqa", {"label": -1}, "row 0 of {place} has no answer (label is -1), as in a test set"),
        ("boolq", {"label": -1}, "has no answer"),
        ("winogrande", {"answer": ""}, "has no answer (answer is '')"),
        ("copa", {"label": -1}, "has no answer"),
        ("piqa", {"sol2": None, "goal": None}, "has no column goal, sol2 (it has sol1, label)"),
        ("boolq", {"label": None}, "has no column label or answer"),
        ("piqa", {"label": 7}, '"answer" must be the index of the right choice, 0 to 1'),
        ("piqa", {"label": "yes"}, "row 0 of {place} is not as it is published"),
        ("arc_easy", {"choices": [1, 2]}, "is not as it is published"),
        ("arc_easy", {"answerKey": "E"}, "is not as it is published: 'E' is not in list"),
        ("sciq", {"support": 3}, "is not as it is published"),
        ("copa", {"question": "why"}, "is not as it is published: there is no 'why'"),
        ("openbookqa", {"question_stem": 5}, '"context" must be a string'),
    ],
)
def test_rows_that_are_wrong_are_named(name, columns, words, tmp_path, capsys):
    wrong_rows(name, tmp_path, **columns)
    out = tmp_path / "out.jsonl"
    assert fetch_task.main([name, str(out), f"--from={tmp_path}"]) == 2
    said = capsys.readouterr().err
    benchmark = BENCHMARKS[name]
    place = tmp_path / benchmark.path / (benchmark.config or "none") / benchmark.split
    sentence = said.splitlines()[-1]
    assert words.format(place=place) in sentence and "Traceback" not in said
    assert not out.exists()


def test_wrong_calls_are_one_sentence(tmp_path, capsys):
    save_rows("piqa", tmp_path / "piqa", 3)
    save_rows("arc_easy", tmp_path / "arc")
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    save_rows("copa", damaged)
    for file in damaged.rglob("*.arrow"):
        file.write_bytes(b"no arrow")
    capsys.readouterr()
    for argv, words in {
        ("arc-easy",): "did you mean arc_easy?",
        ("mmlu_anatomie",): "did you mean mmlu_anatomy?",
        ("zzz",): "it is one of hellaswag, arc_easy",
        ("piqa", "--from", "./nowhere"): "there is no such folder",
        ("piqa", "--from", "./empty"): "looked for state.json",
        ("mmlu", "--from", "./empty"): "looked for state.json",
        ("arc_challenge", "--from", "./arc/allenai/ai2_arc/ARC-Easy"): "looked for state.json",
        ("boolq", "--from", "./piqa/baber/piqa/none"): "is it another benchmark?",
        (
            "piqa",
            "--from",
            "./piqa",
            "--split",
            "test",
        ): "has no split test, it has train, validation",
        ("piqa", "--from", "./piqa", "--shots", "3"): "has only 3 rows",
        ("piqa", "--from", "./piqa", "--shots", "-1"): "numbers from 0 on",
        ("copa", "--from", "./damaged"): "cannot be read by datasets",
        ("piqa", "./no/x.jsonl", "--from", "./piqa"): "a file that can be written",
    }.items():
        name, *rest = argv
        given = [name]
        for each in rest:
            given.append(str(tmp_path / each.removeprefix("./")) if each[:2] == "./" else each)
        if len(given) == 1 or given[1].startswith("--"):
            given.insert(1, str(tmp_path / "out.jsonl"))
        assert fetch_task.main(given) == 2, argv
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1, said


def test_subjects_that_a_folder_lacks_are_named(tmp_path, capsys):
    save_rows("mmlu", tmp_path, 2)
    capsys.readouterr()
    out = tmp_path / "mmlu.jsonl"
    assert fetch_task.main(["mmlu", str(out), f"--from={tmp_path}"]) == 0
    assert "lacks 54 of 57 subjects (business_ethics, clinical" in capsys.readouterr().err
    groups = [row.group for row in tasks.read(EvaluationTask(name="x", file=str(out)))]
    assert groups == [subject for subject in SUBJECTS[:3] for _ in range(2)]


# --------------------------------------------------------------------------------------------------
# real questions, and a real model


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "arc_easy" else pytest.mark.slow)
        for name in bench.NAMES
    ],
)
def test_real_questions_are_put_as_the_harness_puts_them(name, tmp_path):
    pytest.importorskip("lm_eval", reason="pip install -r requirements-test.txt")
    bench.save(name, published("tasks"), tmp_path, 24, 3)
    assert_put_as_in_the_harness(name, tmp_path, tmp_path)


CONTEXTS = (
    "Question: Which?\nAnswer:",
    "ends in spaces  \n",
    "  begins in them",
    "日本語の文 😀 é e\u0301",
    "<think>so</think> <tool_call> 12345",
    "x",
    " \n",
    "",
)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama2", "llama3_1")),
    ],
)
def test_a_published_tokenizer_encodes_contexts_and_choices_as_in_the_harness(name):
    """Including its prefix tokens, its spaces in front of words, and added tokens in a text."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    import transformers

    folder = published(name)
    # not AutoTokenizer, whose class for Llama 2 leaves the normalizer of the file out
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=len(theirs), **sizes, **heads)
    harness = huggingface.HFLM(
        transformers.LlamaForCausalLM(config), tokenizer=theirs, device="cpu", max_length=64
    )
    ours = hf_tokenizer.read(folder)
    puts = {"llama2": 1, "llama3_1": 128_000}
    assert list(ours.put_before) == ([puts[name]] if name in puts else [])
    for context in CONTEXTS:
        for continuation in (" yes", "no", "  two words", " 日本", "<think>", "\n"):
            if context:
                want = harness._encode_pair(context, continuation)
            else:
                scored = harness.tok_encode(continuation, add_special_tokens=False)
                want = ([harness.prefix_token_id], scored)
            if not want[0]:  # no text precedes: see docs/evaluation.md
                want = ([harness.prefix_token_id], want[1])
            assert tasks.encode_pair(ours, context, continuation) == want, (context, continuation)


# one text or several choices, choices with contexts of their own, groups
OF_EACH_KIND = ["arc_challenge", "hellaswag", "winogrande", "boolq", "mmlu"]


@pytest.mark.exhaustive
@pytest.mark.cap(400)
def test_a_real_model_scores_real_questions_as_in_the_harness(tmp_path):
    """The first layers of SmolLM2-135M on some questions of benchmarks of each kind; the whole model
    and more of them by hand, with lab/bench/tasks.py. The tests above compare what is asked, and
    tests/test_evaluation.py what is scored."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    model = first_layers(published("smollm2"), tmp_path / "hf", 3)
    for name in OF_EACH_KIND:
        bench.save(name, published("tasks"), tmp_path, 2, 2)
    theirs_model = huggingface.HFLM(
        str(model), device="cpu", dtype="float32", max_length=bench.WINDOW, batch_size=8
    )
    theirs = bench.by_harness(theirs_model, OF_EACH_KIND, tmp_path)
    ours = bench.by_us(bench.load(model), OF_EACH_KIND, tmp_path, tmp_path)
    for name in OF_EACH_KIND:
        for mine, others in zip(ours[name].of_choices, theirs[name].of_choices, strict=True):
            assert mine == pytest.approx(others, rel=1e-5, abs=1e-4), name
        for key, value in theirs[name].scores.items():
            assert ours[name].scores[key] == pytest.approx(value), (name, key)
    for subject in SUBJECTS[:2]:
        assert ours["mmlu"].scores[f"{subject}/acc"] == theirs[f"mmlu_{subject}"].scores["acc"]
