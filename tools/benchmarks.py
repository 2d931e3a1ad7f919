"""Prompts of published benchmarks: the settings of lm-evaluation-harness 0.4.13, one row each.

A convert function turns a published row into a line of a task's file (data/tasks.py), with the
prompt and the choices of the harness's own file (lm_eval/tasks, under the same name). Where the
choices are part of the context, as in WinoGrande, every choice has a separate context.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

Row = dict[str, Any]


def asked(text: str) -> str:
    return f"Question: {text}\nAnswer:"


def lettered(question: str, choices: list[str]) -> str:
    """The question, and a line for each choice under its letter."""
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False)]
    return "\n".join([question.strip(), *lines, "Answer:"])


LETTERS = ["A", "B", "C", "D", "E"]


def hellaswag(row: Row) -> Row:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    endings = [without_marks(ending) for ending in row["endings"]]
    return choice(without_marks(context), endings, int(row["label"]))


def without_marks(text: str) -> str:
    """Leave out what WikiHow's pages have left in square brackets."""
    sentences = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", sentences).replace("  ", " ")


def arc(row: Row) -> Row:
    answer = row["choices"]["label"].index(row["answerKey"])
    return choice(asked(row["question"]), row["choices"]["text"], answer)


def piqa(row: Row) -> Row:
    return choice(asked(row["goal"]), [row["sol1"], row["sol2"]], int(row["label"]))


def openbookqa(row: Row) -> Row:
    answer = row["choices"]["label"].index(row["answerKey"].strip())
    return choice(row["question_stem"], row["choices"]["text"], answer)


def sciq(row: Row) -> Row:
    choices = [row[f"distractor{number}"] for number in (1, 2, 3)] + [row["correct_answer"]]
    return choice(f"{row['support'].lstrip()}\n{asked(row['question'])}", choices, 3)


def boolq(row: Row) -> Row:
    """SuperGLUE has a label; the dataset's own publication has an answer, true or false."""
    answer = row["label"] if "label" in row else row["answer"]
    context = f"{row['passage']}\n{asked(row['question'] + '?')}"
    return choice(context, ["no", "yes"], int(answer))


def winogrande(row: Row) -> Row:
    """Convert a row: the text after the gap is scored, given the sentence with either name in the gap."""
    before, _, after = row["sentence"].partition("_")
    contexts = [before + row["option1"], before + row["option2"]]
    return choice(contexts, [after.strip()] * 2, int(row["answer"]) - 1)


def commonsense_qa(row: Row) -> Row:
    answer = LETTERS.index(row["answerKey"])
    return choice(
        lettered("Question: " + row["question"].strip(), row["choices"]["text"]), LETTERS, answer
    )


def social_iqa(row: Row) -> Row:
    choices = [row["answerA"], row["answerB"], row["answerC"]]
    return choice(f"Q: {row['context']} {row['question']}\nA:", choices, int(row["label"]) - 1)


def copa(row: Row) -> Row:
    """Give choices a leading space, so that two are scored, as in the harness."""
    connector = {"cause": "because", "effect": "therefore"}[row["question"]]
    choices = [f" {text[0].lower()}{text[1:]}" for text in (row["choice1"], row["choice2"])]
    context = f"{row['premise'].strip()[:-1]} {connector}"
    return choice(context, choices, int(row["label"]))


def mmlu(row: Row) -> Row:
    return choice(lettered(row["question"], row["choices"]), LETTERS[:4], int(row["answer"]))


def lambada(row: Row) -> Row:
    """word_perplexity is the harness's perplexity."""
    context, _, last = row["text"].rpartition(" ")
    return {"context": context, "text": last}


def choice(context: str | list[str], choices: list[str], answer: int) -> Row:
    return {"context": context, "choices": choices, "answer": answer}


class Benchmark(NamedTuple):
    path: str  # of the hub
    config: str | None
    split: str  # that the harness scores
    convert: Callable[[Row], Row]
    columns: tuple[str, ...]  # that convert reads; "a|b": one of them
    answer: str | None = None  # the column that says which choice is right
    other_paths: tuple[str, ...] = ()  # of the same rows
    examples: str = "train"  # the split that examples are drawn from
    in_order: bool = False  # examples are the first ones of their split, not drawn
    description: str = ""  # before examples and question
    group: str | None = None  # of its questions, in a benchmark of several

    @property
    def also_drawn(self) -> bool:
        """Tell whether the harness, which takes every task without a test split so, draws one
        example more than it needs, in case one of them is the question."""
        return self.split == "validation"


ARC_COLUMNS = ("question", "choices", "answerKey")
GLUE = "aps/super_glue"
GLUE_TOO = ("super_glue", "boolq", "google/boolq")

BENCHMARKS = {
    "hellaswag": Benchmark(
        "Rowan/hellaswag",
        None,
        "validation",
        hellaswag,
        ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        "label",
    ),
    "arc_easy": Benchmark("allenai/ai2_arc", "ARC-Easy", "test", arc, ARC_COLUMNS, "answerKey"),
    "arc_challenge": Benchmark(
        "allenai/ai2_arc", "ARC-Challenge", "test", arc, ARC_COLUMNS, "answerKey"
    ),
    "piqa": Benchmark(
        "baber/piqa", None, "validation", piqa, ("goal", "sol1", "sol2", "label"), "label"
    ),
    "openbookqa": Benchmark(
        "allenai/openbookqa",
        "main",
        "test",
        openbookqa,
        ("question_stem", "choices", "answerKey"),
        "answerKey",
    ),
    "sciq": Benchmark(
        "allenai/sciq",
        None,
        "test",
        sciq,
        ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer"),
        "correct_answer",
    ),
    "boolq": Benchmark(
        GLUE,
        "boolq",
        "validation",
        boolq,
        ("passage", "question", "label|answer"),
        "label|answer",
        GLUE_TOO,
    ),
    "winogrande": Benchmark(
        "allenai/winogrande",
        "winogrande_xl",
        "validation",
        winogrande,
        ("sentence", "option1", "option2", "answer"),
        "answer",
    ),
    "commonsense_qa": Benchmark(
        "tau/commonsense_qa",
        None,
        "validation",
        commonsense_qa,
        ("question", "choices", "answerKey"),
        "answerKey",
    ),
    "social_iqa": Benchmark(
        "lighteval/siqa",
        None,
        "validation",
        social_iqa,
        ("context", "question", "answerA", "answerB", "answerC", "label"),
        "label",
        ("allenai/social_i_qa", "social_iqa"),
    ),
    "copa": Benchmark(
        GLUE,
        "copa",
        "validation",
        copa,
        ("premise", "choice1", "choice2", "question", "label"),
        "label",
    ),
    "lambada_openai": Benchmark(
        "EleutherAI/lambada_openai", "default", "test", lambada, ("text",), examples="test"
    ),
}

SUBJECTS = """
    abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology
    college_chemistry college_computer_science college_mathematics college_medicine college_physics
    computer_security conceptual_physics econometrics electrical_engineering elementary_mathematics
    formal_logic global_facts high_school_biology high_school_chemistry high_school_computer_science
    high_school_european_history high_school_geography high_school_government_and_politics
    high_school_macroeconomics high_school_mathematics high_school_microeconomics
    high_school_physics high_school_psychology high_school_statistics high_school_us_history
    high_school_world_history human_aging human_sexuality international_law jurisprudence
    logical_fallacies machine_learning management marketing medical_genetics miscellaneous
    moral_disputes moral_scenarios nutrition philosophy prehistory professional_accounting
    professional_law professional_medicine professional_psychology public_relations security_studies
    sociology us_foreign_policy virology world_religions
""".split()


def _subject(name: str) -> Benchmark:
    about = name.replace("_", " ")
    return Benchmark(
        "cais/mmlu",
        name,
        "test",
        mmlu,
        ("question", "choices", "answer"),
        "answer",
        ("hails/mmlu_no_train",),
        examples="dev",
        in_order=True,
        description=f"The following are multiple choice questions (with answers) about {about}.\n\n",
        group=name,
    )


BENCHMARKS |= {f"mmlu_{name}": _subject(name) for name in SUBJECTS}
MMLU = "mmlu"  # all subjects as one task


def parts_of(name: str) -> list[Benchmark]:
    """The benchmarks that a name stands for: one, or MMLU's 57."""
    if name == MMLU:
        return [BENCHMARKS[f"mmlu_{subject}"] for subject in SUBJECTS]
    return [BENCHMARKS[name]]
