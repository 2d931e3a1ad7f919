"""Evaluation: what a task scores, the same on every mesh, and without a trace in training."""

import json
import math
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import train
from checkpoint import verify
from configs.load import load_config
from configs.schema import EvaluationTask, InputError
from data import tasks
from data.tokenizer import SPLIT, Tokenizer, byte_tokenizer
from parallelisms import mesh as meshes
from tests.conversations import write
from tests.ranks import run_ranks
from tests.runs import (
    CONTEXT_MESHES,
    EXPERT_MESHES,
    MESHES,
    SMALL_MODEL,
    TINY,
    ULYSSES,
    lines_of,
    of_family,
    run,
    said,
    series,
    tiny_run,
)
from tools import check, sampling
from tools import evaluate as evaluate_tool
from tools.report import charts, tables
from tools.report.run import read_runs
from training import evaluate, greedy
from training.scores import scores

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 16
WORDS = "the red fox and a blue café sat on mats of straw while seven others ran".split()


def questions(count: int) -> list[dict]:
    """Return contexts of 0 to 30 bytes, with three choices of different lengths."""
    rows = []
    for i in range(count):
        words = [WORDS[(i * 7 + j) % len(WORDS)] for j in range(i % 7)]
        context = " ".join(words) + (" " if i % 5 == 4 else "")
        choices = [WORDS[(i + j * j) % len(WORDS)] for j in (1, 2, 3)]
        rows.append({"context": context, "choices": choices, "answer": i % 3})
    return rows


def texts(count: int) -> list[dict]:
    return [{"text": " ".join(WORDS[i:] * (i % 4 + 1)) + "\n" * (i % 2)} for i in range(count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("tasks")
    return {
        "multiple_choice": write(place / "questions.jsonl", questions(23)),
        "perplexity": write(place / "texts.jsonl", texts(5)),
    }


def row(file: Path, kind: str = "multiple_choice", **more) -> EvaluationTask:
    return EvaluationTask(name="task", file=str(file), kind=kind, **more)


def merging(*tokens: bytes) -> Tokenizer:
    """Return a BPE of bytes and these tokens."""
    ranks = [*byte_tokenizer().ranks, *tokens]
    return Tokenizer(ranks, SPLIT, ["<|endoftext|>"], "<|endoftext|>")


def opened(files: dict[str, Path]) -> list[tasks.EncodedTask]:
    return [
        tasks.open_task(row(file, kind), byte_tokenizer(), WINDOW) for kind, file in files.items()
    ]


# --------------------------------------------------------------------------------------------------
# files


WRONG = {  # a line -> the words of the sentence
    "{": "the line is not JSON",
    "[1]": "the line is not a JSON object",
    '{"contxt": "a"}': '"context" is missing, the line has contxt',
    '{"context": 1, "choices": ["a", "b"], "answer": 0}': '"context" must be a string',
    '{"context": "", "choices": ["a"], "answer": 0}': "two strings or more",
    '{"context": "", "choices": "ab", "answer": 0}': "two strings or more",
    '{"context": "", "choices": ["a", ""], "answer": 0}': "choice 1 must be a string that is not",
    '{"context": "", "choices": ["a", "b"]}': "0 to 1, and is null",
    '{"context": "", "choices": ["a", "b"], "answer": 2}': "0 to 1, and is 2",
    '{"context": "", "choices": ["a", "b"], "answer": true}': "0 to 1, and is true",
    '{"context": "\\ud800", "choices": ["a", "b"], "answer": 0}': "half of a surrogate pair",
    '{"context": ["a"], "choices": ["a", "b"], "answer": 0}': "one context for each choice",
    '{"context": ["a", 1], "choices": ["a", "b"], "answer": 0}': "context 1 must be a string",
    '{"context": "", "choices": ["a", "b"], "answer": 0, "group": 3}': '"group" must be a name',
    '{"context": "", "choices": ["a", "b"], "answer": 0, "group": "a/b"}': '"group" must be a name',
    '{"context": "lost", "context": "", "choices": ["a", "b"], "answer": 0}': 'has "context" twice',
}
RIGHT = '{"context": "a", "choices": ["b", "c"], "answer": 1, "id": 7}'


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named(line, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(f"{RIGHT}\n\n{line}\n")
    with pytest.raises(InputError) as error:
        tasks.read(row(path))
    assert str(error.value).startswith(f"{path}:3: ") and WRONG[line] in str(error.value)
    path.write_text(f"\ufeff{RIGHT}\r\n", encoding="utf-8")
    assert tasks.read(row(path)) == [tasks.Question(1, "a", ["b", "c"], 1)]


def test_a_line_is_a_text_or_a_question(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a", "choices": ["b", "c"], "answer": 0}\n')
    with pytest.raises(InputError, match=':1: the line has "text" and "choices"'):
        tasks.read(row(path, kind="perplexity"))


def test_a_file_that_cannot_be_scored_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere.jsonl: .* cannot be read"):
        tasks.read(row(tmp_path / "nowhere.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(RIGHT.encode() + b'\n{"context": "\xff"}\n')
    with pytest.raises(InputError, match="bytes.jsonl:2: byte 13 of the line is not UTF-8"):
        tasks.read(row(tmp_path / "bytes.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="empty.jsonl: .* no line"):
        tasks.read(row(tmp_path / "empty.jsonl"))
    long = write(
        tmp_path / "long.jsonl", [{"context": "a", "choices": ["b", "c" * 16], "answer": 0}]
    )
    with pytest.raises(
        InputError, match="long.jsonl:1: choice 1 has 17 tokens, and the model sees 16"
    ):
        tasks.open_task(row(long), byte_tokenizer(), WINDOW)
    write(tmp_path / "text.jsonl", [{"text": "a"}, {"text": ""}])
    with pytest.raises(InputError, match='text.jsonl:2: "text" must be a string that is not empty'):
        tasks.read(row(tmp_path / "text.jsonl", "perplexity"))


def test_a_choice_that_merges_with_its_context_is_named(tmp_path):
    tokenizer = merging(b"ab")
    file = write(tmp_path / "x.jsonl", [{"context": "a", "choices": ["x", "b"], "answer": 0}])
    assert len(tokenizer.encode("ab")) == 1
    with pytest.raises(
        InputError, match="x.jsonl:1: the tokenizer joins choice 1 with the context"
    ):
        tasks.open_task(row(file, delimiter=""), tokenizer, WINDOW)
    assert tasks.open_task(row(file), tokenizer, WINDOW).requests


# --------------------------------------------------------------------------------------------------
# what is scored


def test_which_tokens_are_scored():
    bytes_ = byte_tokenizer()
    end = bytes_.eot_id
    assert tasks.encode_pair(bytes_, "ab", " c") == (list(b"ab"), list(b" c"))
    assert tasks.encode_pair(bytes_, "ab \n", " c") == (list(b"ab"), list(b" \n c"))
    assert tasks.encode_pair(bytes_, "", " c") == ([end], list(b" c"))
    assert tasks.encode_pair(bytes_, "\n", " c") == ([end], list(b"\n c"))
    begins = Tokenizer(bytes_.ranks, "", ["<|endoftext|>", "<|begin_of_text|>"], "<|endoftext|>")
    assert tasks.first(begins) == 257


def test_a_long_context_loses_its_beginning_and_is_counted(files):
    questions, texts = opened(files)
    longest = max(len(request.tokens) for request in questions.requests)
    assert longest == WINDOW + 1
    rows = [json.loads(line) for line in files["multiple_choice"].read_text().splitlines()]
    cut = [
        number
        for number, row in enumerate(rows, 1)
        if max(len(f"{row['context']} {choice}".encode()) for choice in row["choices"]) > WINDOW + 1
    ]
    assert questions.truncated == cut and cut
    assert f"{len(cut)} of them are longer than 16 tokens" in questions.describe(WINDOW)
    assert texts.truncated == []


@pytest.mark.parametrize("count", [1, 15, 16, 17, 32, 33])
def test_windows_score_each_token_once_and_are_whole(count):
    ids = list(range(1, count + 1))
    requests = list(tasks.windows(ids, 0, WINDOW))
    scored = [token for request in requests for token in request.tokens[-request.scored :]]
    assert scored == ids
    assert [len(request.tokens) - 1 for request in requests[:-1]] == [WINDOW] * (len(requests) - 1)
    assert len(requests[-1].tokens) - 1 == min(count, WINDOW)


def test_accuracy_by_each_length(tmp_path):
    """Each length, and none, chooses another choice: a task scored by the wrong one is seen."""
    choices = ["a", "éééé", "bcdefg", "hi jk lmn"]
    file = write(tmp_path / "x.jsonl", [{"context": "x", "choices": choices, "answer": 0}] * 3)
    task = tasks.open_task(row(file), merging("é".encode()), WINDOW)
    found = np.array([-6.0, -7.5, -9.0, -13.0] * 3)
    chosen = {"acc": 0, "acc_norm": 3, "acc_bytes": 1, "acc_tokens": 2}
    for answer in range(4):
        task.rows[:] = [row._replace(answer=answer) for row in task.rows]
        values = scores(task, found, 0 * found)
        assert {key: values[key] for key in chosen} == {
            key: float(best == answer) for key, best in chosen.items()
        }
    task.rows[0] = task.rows[0]._replace(answer=0)
    values = scores(task, found, 0 * found)
    assert [values["acc"], values["acc_stderr"]] == pytest.approx([1 / 3, 1 / 3])


def test_perplexities_and_their_errors(tmp_path):
    rows = [{"text": "a b"}, {"text": " a\n"}, {"text": "abc d"}]
    task = tasks.open_task(row(write(tmp_path / "x", rows), "perplexity"), byte_tokenizer(), 2)
    counts = np.array([3, 3, 5])
    assert [request.scored for request in task.requests] == [2, 1, 2, 1, 2, 2, 1]
    values = scores(task, np.full(7, -1.0), np.zeros(7))
    assert values["token_perplexity"] == values["byte_perplexity"] == math.exp(7 / counts.sum())
    assert values["word_perplexity"] == math.exp(7 / (2 + 3 + 2))
    assert values["bits_per_byte"] == pytest.approx(7 / 11 / math.log(2))
    # the jackknife of the ratio agrees with its linearisation up to terms of a higher order
    nats = np.random.default_rng(0).normal(100, 9, 400)
    many = np.random.default_rng(1).integers(40, 60, 400)
    big = tasks.EncodedTask("x", "perplexity", [tasks.Text(1, "a" * n) for n in many])
    big.requests.extend(tasks.ScoreRequest([0] * (n + 1), n) for n in many)
    big.row_of_request.extend(range(400))
    without = (nats.sum() - nats) / (many.sum() - many) / math.log(2)
    jackknife = math.sqrt(399 * without.var())
    assert scores(big, -nats, nats)["bits_per_byte_stderr"] == pytest.approx(jackknife, rel=0.01)
    alone = tasks.EncodedTask(
        "x", "perplexity", task.rows[:1], task.requests[:2], task.row_of_request[:2]
    )
    found = scores(alone, np.full(2, -1.0), np.zeros(2))
    assert not any("stderr" in key or "acc" in key for key in found)


def test_a_text_with_a_context_is_scored_behind_it(tmp_path):
    rows = [{"context": "the red", "text": "fox"}, {"context": "a" * 20, "text": "b"}]
    task = tasks.open_task(row(write(tmp_path / "x", rows), "perplexity"), byte_tokenizer(), WINDOW)
    assert task.requests[0] == tasks.ScoreRequest(list(b"the red fox"), 4)
    assert [request.scored for request in task.requests] == [4, 2] and task.truncated == [2]
    found = scores(task, np.array([-3.0, -5.0]), np.array([1.0, 0.0]))
    assert found["word_perplexity"] == math.exp(4)
    assert (found["acc"], found["acc_stderr"]) == (0.5, 0.5)
    # of those with a context alone, and of these all tokens must be right
    rows.append({"text": "whole"})
    mixed = tasks.open_task(
        row(write(tmp_path / "y", rows), "perplexity"), byte_tokenizer(), WINDOW
    )
    for mistakes, acc in {(0, 0, 3): 1.0, (4, 1, 0): 0.0}.items():
        assert scores(mixed, np.full(3, -1.0), np.array(mistakes, float))["acc"] == acc


# --------------------------------------------------------------------------------------------------
# files that are made


def test_the_task_that_ships_has_its_answers():
    shipped = tasks.read(row(ROOT / "data" / "examples" / "next_line.jsonl"))
    assert len(shipped) == 50 and {question.answer for question in shipped} == {0, 1, 2, 3}
    assert all(question.context.endswith("   ") for question in shipped)


# --------------------------------------------------------------------------------------------------
# every mesh


BATCH = ["--training.global_batch_size=24", "--training.local_batch_size=2"]
LLAMA: list[str] = []
EXPERTS = [
    "--model.family=qwen3",
    "--model.n_experts=8",
    "--model.experts_per_token=3",
    "--model.expert_dim=12",
]
ALL_MESHES = MESHES | CONTEXT_MESHES | EXPERT_MESHES
ALL_MESHES["cp2, heads swapped for tokens"] = (2, [*CONTEXT_MESHES["cp2"][1], ULYSSES], 1)


class Answers(NamedTuple):
    """What one process finds, one request after another."""

    family: list[str]
    likelihoods: list[list[float]]  # of both tasks
    requests: list[tasks.ScoreRequest]  # to be continued
    mistakes: list[int]  # tokens of each that are not the likeliest


def restless(options: list[str]) -> train.Job:
    """Return a job whose logits differ by more than rounding."""
    world = meshes.world()
    job = train.build(load_config([*SMALL_MODEL, *BATCH, *options], world.size, world.local_size))
    with torch.no_grad():
        for weight in job.model.parameters():
            weight.mul_(4)
    return job


@torch.no_grad()
def one_by_one(files: dict[str, Path], family: list[str]) -> Answers:
    """Find them from whole logits, without padding."""
    model = restless(family).model
    found = []
    for task in opened(files):
        found.append([])
        for request in task.requests:
            ids = torch.tensor([request.tokens])
            logits = model(ids[:, :-1], torch.arange(ids.shape[1] - 1))
            by_token = logits.log_softmax(-1).gather(2, ids[:, 1:, None])
            found[-1].append(float(by_token[0, -request.scored :].sum()))
    return Answers(family, found, *continuations(model))


def continuations(model: nn.Module) -> tuple[list[tasks.ScoreRequest], list[int]]:
    """Return contexts, each with what the model itself writes after it, in which some tokens have
    been replaced; and how many of each."""
    generator = np.random.default_rng(3)
    requests = []
    wrong = []
    for i in range(16):
        tokens = generator.integers(0, 257, 1 + i % 9).tolist()
        scored = 1 + i % 4
        wrong.append(0)
        for place in range(scored):
            logits = model(torch.tensor([tokens]), torch.arange(len(tokens)))[0, -1]
            best = logits.topk(2)
            assert best.values[0] - best.values[1] > 1e-3
            takes_another = i % 3 == 1 and place in (0, 2)
            wrong[-1] += takes_another
            tokens.append(int(best.indices[int(takes_another)]))
        requests.append(tasks.ScoreRequest(tokens, scored))
    assert 0 in wrong and max(wrong) > 1
    return requests, wrong


def all_answers(files: dict[str, Path]) -> dict[str, Answers]:
    return {name: one_by_one(files, of) for name, of in (("llama", LLAMA), ("experts", EXPERTS))}


@pytest.fixture(scope="module")
def answers(files) -> dict[str, Answers]:
    return run_ranks(1, all_answers, files)[0]


def found_on_mesh(
    options: list[str], files: dict[str, Path], requests: list, bug: str = ""
) -> tuple[list[list[float]], list[float]]:
    """Return the log-likelihoods and the mistakes on this rank. bug: what a negative control
    breaks."""
    job = restless(options)
    real = evaluate.batch_of
    if bug == "a rank drops its requests" and job.mesh.dp_rank == 1:
        evaluate.batch_of = lambda requests, share, mesh: real(
            requests, share._replace(requests=[]), mesh
        )
    if bug == "rows of a rank":
        greedy.dist = SimpleNamespace(all_reduce=lambda *_: None, ReduceOp=greedy.dist.ReduceOp)
    if bug == "the microbatch":
        place = torch.Tensor.as_strided
        torch.Tensor.as_strided = lambda x, shape, stride, _: place(x, shape, stride, 0)
    size = job.cfg.training.local_batch_size * job.cfg.training.seq_len
    likelihoods = [
        evaluate.score_requests(job.model, job.mesh, task.requests, size, 40)[0].tolist()
        for task in opened(files)
    ]
    found = evaluate.score_requests(job.model, job.mesh, requests, 32, 3)
    return likelihoods, found.mistakes.tolist()


def on_mesh(mesh: str, files: dict[str, Path], of: Answers, bug: str = "") -> list:
    count, options, _ = ALL_MESHES[mesh]
    return run_ranks(count, found_on_mesh, [*of.family, *options], files, of.requests, bug)


def are_near(found: list[list[float]], wanted: list[list[float]]) -> bool:
    return all(np.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "mesh",
    [
        "tp2",
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in ("pp2xcp2", "cp2, heads swapped for tokens", "ep2")
        ),
    ],
)
def test_every_mesh_finds_what_one_process_finds(mesh, files, answers):
    """The log-likelihoods, and which tokens the model would not write."""
    of = answers["experts" if mesh == "ep2" else "llama"]
    first, *others = on_mesh(mesh, files, of)
    assert are_near(first[0], of.likelihoods) and first[1] == of.mistakes
    assert all(other == first for other in others), "bitwise"


@pytest.mark.parametrize(
    "bug, mesh",
    [
        ("a rank drops its requests", "fsdp2"),
        pytest.param("rows of a rank", "tp2", marks=pytest.mark.slow),
        pytest.param("the microbatch", "pp2", marks=pytest.mark.slow),
    ],
)
def test_negative_control_the_mistake_is_seen(bug, mesh, files, answers):
    likelihoods, mistakes = on_mesh(mesh, files, answers["llama"], bug)[0]
    if bug == "a rank drops its requests":
        assert not are_near(likelihoods, answers["llama"].likelihoods)
    else:
        assert mistakes != answers["llama"].mistakes


# --------------------------------------------------------------------------------------------------
# runs


BALANCED = [
    "--model.family=deepseek_v3",
    *EXPERTS[1:],
    "--model.balance_loss=0.05",
    "--training.expert_bias_speed=0.01",
]


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    return [*tiny_run(tmp_path_factory.mktemp("run")), "--training.steps=6"]


def with_tasks(files: dict[str, Path], interval: int) -> list[str]:
    rows = [f'{{name="{kind}",file="{file}",kind="{kind}"}}' for kind, file in files.items()]
    return [f"--evaluation.tasks=[{','.join(rows)}]", f"--evaluation.interval={interval}"]


def last_state(folder: Path) -> bytes:
    """Return the tensors of a run's last checkpoint: weights, moments, biases of experts and torch's
    random numbers."""
    return (folder / "checkpoints" / "step-00000006" / verify.file_name(0)).read_bytes()


def test_evaluation_leaves_no_trace_in_training(options, files, tmp_path):
    """Losses, norms and the state, bitwise."""
    dense = of_family("deepseek_v3", options)
    left = []
    for name, more in {"without": [], "with": with_tasks(files, 2)}.items():
        assert run_ranks(1, run, [*dense, *BALANCED, *more], tmp_path / name) == [(0, "")]
        norms = series(tmp_path / name), series(tmp_path / name, "grad_norm")
        left.append((*norms, last_state(tmp_path / name)))
    assert left[0] == left[1]
    evaluated = [
        line
        for line in lines_of(tmp_path / "with")
        if "evaluation/perplexity/bits_per_byte" in line
    ]
    assert [line["step"] for line in evaluated] == [2, 4, 6]
    assert "evaluation/multiple_choice/acc_norm_stderr" in evaluated[0]


def test_a_run_says_its_scores_and_the_tool_finds_them_again(options, files, tmp_path, capsys):
    """At the end alone, since there is no interval. The page about the run has them."""
    assert run_ranks(1, run, [*options, *with_tasks(files, 0)], tmp_path) == [(0, "")]
    [last] = [line for line in lines_of(tmp_path) if "evaluation/multiple_choice/acc" in line]
    assert last["step"] == 6
    log = said(tmp_path)
    assert "step 6/6  evaluation of multiple_choice: acc 0." in log and " ± " in log
    assert "(chance 0.333)" in log
    assert last["evaluation/multiple_choice/chance"] == pytest.approx(1 / 3)
    assert "evaluation/perplexity/chance" not in last
    assert "of them are longer than 16 tokens" in log
    assert evaluate_tool.main([str(tmp_path), "--json", str(tmp_path / "scores.json")]) == 0
    table = capsys.readouterr().out
    found = json.loads((tmp_path / "scores.json").read_text())
    for result in found:
        for key, value in result["scores"].items():
            assert value == pytest.approx(last[f"evaluation/{result['name']}/{key}"], rel=1e-5)
            assert key.endswith("_stderr") or f"{value:.4f}" in table
    named = ["--task", str(files["perplexity"]), "--window", "16"]
    assert evaluate_tool.main([str(tmp_path), *named]) == 0
    again = capsys.readouterr().out
    assert f"{last['evaluation/perplexity/bits_per_byte']:.4f}" in again
    joined = evaluate_tool.wanted(tmp_path, [str(files["multiple_choice"])], "")
    assert [task.delimiter for task in joined] == [""]
    page = report_of(tmp_path)
    assert "Evaluation: multiple_choice" in page and "acc, ± standard error, chance 0.333" in page
    assert re.search(r"multiple_choice, acc<td[^>]*>0\.\d+ ± 0\.\d+ \(chance 0\.333\d*\)", page)
    assert "_stderr" not in page and "truncated" not in page


def report_of(folder: Path) -> str:
    [loaded] = read_runs([folder])
    known, others = charts.panels_of([loaded])
    across = charts.Axis(0, 6)
    drawn = [charts.chart(chosen, [loaded.name], across, 50)[0] for chosen in others]
    return "".join(drawn) + tables.summary([loaded])


def stopping(options: list[str], folder: Path) -> int:
    """Do a run whose rank 1 gets SIGTERM while it evaluates for the first time."""
    real = evaluate.batch_of

    def with_signal(*given):
        if meshes.world().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*given)

    evaluate.batch_of = with_signal
    return run(options, folder)[0]


def test_a_signal_during_evaluation_stops_the_run_with_a_checkpoint(options, files, tmp_path):
    more = with_tasks(files, 2)
    assert run_ranks(2, stopping, [*options, *more], tmp_path) == [75, 75]
    assert not any(key.startswith("evaluation/") for line in lines_of(tmp_path) for key in line)
    assert "step 2: no evaluation, since the run is to stop" in said(tmp_path)
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


def test_a_wrong_file_is_named_before_anything_starts(tmp_path, capsys):
    file = tmp_path / "x.jsonl"
    file.write_text(RIGHT + "\n{\n")
    option = f'--evaluation.tasks=[{{name="a",file="{file}"}}]'
    assert check.main([option]) == 2
    assert f"{file}:2: the line is not JSON" in capsys.readouterr().err
    file.write_text(RIGHT + "\n")
    assert check.main([option]) == 0


def test_a_wrong_call_of_the_tool_is_one_sentence(tmp_path, capsys):
    file = write(tmp_path / "x.jsonl", [{"text": ""}])
    hugging_face = tmp_path / "hf"
    hugging_face.mkdir()
    (hugging_face / "config.json").write_text("{}")
    for argv, words in {
        (str(tmp_path),): "there is no checkpoint in",
        (str(hugging_face),): "has no tasks: name a file with --task",
        (str(hugging_face), f"--json={tmp_path}/no/scores.json"): "its folder does not exist",
        (str(tmp_path), "--task", str(file)): 'x.jsonl:1: "text" must be a string',
        (str(tmp_path), "--task", f"{tmp_path}/no"): "cannot be read",
    }.items():
        assert evaluate_tool.main(list(argv)) == 2
        said_ = capsys.readouterr().err
        assert words in said_ and said_.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# lm-evaluation-harness, on the exported model and the same files


EXPORTED = [
    *(option for option in TINY if "vocab_size" not in option and "tokenizer" not in option),
    "--model.vocab_size=320",
    "--data.tokenizer=bpe",
    "--data.bpe_vocab_size=310",
    "--training.steps=12",
    "--lr_schedule.warmup_steps=1",
    "--optimizer.lr=0.05",
    "--checkpoint.export_hf=float32",
]
METRICS = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes"),
    "perplexity": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "last_word": ("acc",),
}


def rows_of(count: int) -> dict[str, list[dict]]:
    """Return questions whose contexts are empty, short, end in whitespace or are longer than the
    window; texts of less than a window, of one, and of several."""
    questions = []
    texts = []
    for i in range(count):
        words = [WORDS[(i * 7 + j) % len(WORDS)] for j in range(i % 9 * 2)]
        context = " ".join(words) + ("", " ", "\n")[i % 3] * bool(words)
        choices = [" ".join(WORDS[(i + j) % len(WORDS) :][:j]) or "é" for j in (1, 2, 4)]
        questions.append({"context": context, "choices": choices, "answer": i % 3})
        text = "\n" * (i % 2) + " ".join(WORDS[i % 5 :] * (i % 3 + 1)) + " " * (i % 4 == 3)
        texts.append({"text": text})
    last_words = [
        {"context": " ".join(WORDS[: i % 9 + 1]), "text": WORDS[i % 8]} for i in range(count)
    ]
    return {"multiple_choice": questions, "perplexity": texts, "last_word": last_words}


@pytest.fixture(scope="module")
def harness_folder(tmp_path_factory) -> Path:
    """A run with its export, and the files."""
    place = tmp_path_factory.mktemp("harness")
    generator = np.random.default_rng(0)
    corpus = "\n".join(" ".join(generator.choice(WORDS, 200)) for _ in range(40))
    (place / "corpus.txt").write_text(corpus, encoding="utf-8")
    more = [f"--data.source={place}/corpus.txt", f"--data.cache={place}/cache"]
    assert run_ranks(1, run, [*EXPORTED, *more], place / "run") == [(0, "")]
    for kind, rows in rows_of(31).items():
        if kind == "last_word":
            rows = [its_own(place / "run", row) if i % 2 else row for i, row in enumerate(rows)]
        write(place / f"{kind}.jsonl", rows)
    return place


def its_own(run_folder: Path, row: dict) -> dict:
    """Return the row with a word, or its beginning, that the model writes itself: of up to three
    tokens."""
    loaded = sampling.load(run_folder)
    for count in 3, 2, 1:
        *_, [text] = sampling.texts_as_they_come(loaded, [row["context"]], count, temperature=0)
        written = text.removeprefix(row["context"] + " ")
        if written != text and written.split() == [written]:
            return row | {"text": written}
    return row


def of_harness(folder: Path) -> dict[str, dict]:
    """Return the results of lm-evaluation-harness: kind -> metrics, and the log-likelihoods of each
    row."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    [exported] = (folder / "run" / "hf").iterdir()
    model = HFLM(str(exported), device="cpu", dtype="float32", max_length=WINDOW, batch_size=4)
    of_kinds = {  # output type, what its text and target are, and metrics
        "multiple_choice": ("multiple_choice", "context", "answer", METRICS["multiple_choice"]),
        "perplexity": ("loglikelihood_rolling", "", "text", METRICS["perplexity"]),
        "last_word": ("loglikelihood", "context", "{{' ' + text}}", ("perplexity", "acc")),
    }
    rows = [
        {
            "dataset_path": "json",
            "test_split": "test",
            "task": kind,
            "dataset_kwargs": {"data_files": {"test": f"{folder}/{kind}.jsonl"}},
            "output_type": output,
            "doc_to_text": text,
            "doc_to_target": target,
            "metric_list": [{"metric": name} for name in metrics],
        }
        for kind, (output, text, target, metrics) in of_kinds.items()
    ]
    rows[0]["doc_to_choice"] = "choices"
    found = simple_evaluate(model, tasks=rows, bootstrap_iters=100, log_samples=True)
    results = {}
    for kind, metrics in found["results"].items():
        samples = sorted(found["samples"][kind], key=lambda sample: sample["doc_id"])
        # of a choice its log-likelihood, and whether it is the likeliest text
        each = [np.ravel(sample["filtered_resps"]).tolist() for sample in samples]
        if kind != "perplexity":
            each = [values[::2] for values in each]
        scores_ = {key.partition(",")[0]: value for key, value in metrics.items()}
        results[kind] = {"scores": scores_, "samples": each}
    return results


@pytest.mark.cap(200)
def test_log_likelihoods_scores_and_errors_are_those_of_lm_evaluation_harness(
    harness_folder, monkeypatch
):
    """Compared on a checkpoint and on its export."""
    pytest.importorskip("lm_eval", reason="pip install -r requirements-test.txt")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(harness_folder / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = of_harness(harness_folder)
    [exported] = (harness_folder / "run" / "hf").iterdir()
    named = [f"--task={harness_folder}/{kind}.jsonl" for kind in METRICS]
    out = harness_folder / "scores.json"
    for more in [[str(harness_folder / "run")], [str(exported), f"--window={WINDOW}"]]:
        assert evaluate_tool.main([*more, *named, f"--json={out}"]) == 0
        for result in json.loads(out.read_text()):
            want = theirs[result["name"]]
            for sample, values in zip(result["samples"], want["samples"], strict=True):
                of_row = sample["log_likelihoods"]
                of_row = of_row if len(values) > 1 else [sum(of_row)]
                assert of_row == pytest.approx(values, rel=1e-5), sample
            for key in METRICS[result["name"]]:
                assert result["scores"][key] == pytest.approx(want["scores"][key], rel=1e-5)
                error = want["scores"][key + "_stderr"]
                if error != "N/A":
                    assert result["scores"][key + "_stderr"] == pytest.approx(error, rel=1e-5)
            if result["name"] == "last_word":
                assert 0 < want["scores"]["acc"] < 1
                perplexity = want["scores"]["perplexity"]
                assert result["scores"]["word_perplexity"] == pytest.approx(perplexity, rel=1e-5)
            lines = result["truncated_lines"]
            assert bool(lines) == (result["kind"] == "multiple_choice")
