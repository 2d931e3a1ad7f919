"""Reads Hugging Face's tokenizer.json, writes a `Tokenizer` as one, and proves where tiktoken makes
the same ids as `tokenizers`.

Both run byte-level BPE, but they describe it differently. tiktoken (and `Tokenizer`) keeps ranks:
two adjacent tokens may merge whenever their concatenation is a token, the lowest rank first.
`tokenizers` keeps a list of merges: pairs, the earliest in the list first. `merges` derives that
list, so that both do the same to every text.

Proof that the result is the same: consider a token T, and the merges in any text inside the bytes
that become T. No merge crosses the borders of T. Of the merges inside, the lowest rank comes first,
and the leftmost among equals. So they are the merges, in the same order, that the bytes of T alone
would get. The last pair before T is therefore the same wherever T is made, and the list of these
pairs, in the order of ranks, allows exactly the merges that happen by rank. `_ranks` goes from such
a list back to ranks.
"""

from __future__ import annotations

import functools
import json
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from configs.schema import InputError
from data import kept_proofs, kinds, library
from data.ends import begin_and_end
from data.proved import Added, Proof
from data.tokenizer import (
    NO_SPLIT,
    SPLIT,
    SPLIT_CL100K,
    SPLIT_GPT2,
    SPLIT_O200K,
    SPLIT_QWEN2,
    SPLIT_QWEN35,
    Tokenizer,
    letters_of_bytes,
)

# Patterns that mean the same in the regular expressions of tiktoken and tokenizers, and that match
# every text from end to end (tiktoken drops the text between two matches).
SPLITS = (SPLIT, SPLIT_CL100K, SPLIT_GPT2, SPLIT_O200K, SPLIT_QWEN2)
# Mistral's (tekken.json): o200k's without contractions, digits one by one.
SPLIT_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The three cuts of deepseek-ai/DeepSeek-V3 (tokenizer.json): digits, then kana and ideographs, then
# the rest, each in what the cut before it has left.
CUTS_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _with_gaps(pattern: str) -> str:
    """Let a pattern match the text between its matches too, which a Split keeps as a piece."""
    return rf"{pattern}|(?:(?!{pattern})[\s\S])+"


# As one pattern. What the first two cuts take is no part of any class of the third, and a piece of
# whitespace ends before it as at the end of a text.
_EAST = r"\x{3040}-\x{30ff}\x{4e00}-\x{9fa5}"
SPLIT_DEEPSEEK = _with_gaps(
    rf"\p{{N}}{{1,3}}|[{_EAST}]+"
    r"|[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{_EAST}]?[\p{{L}}\p{{M}}&&[^{_EAST}]]+"
    rf"| ?[\p{{P}}\p{{S}}&&[^{_EAST}]]+[\r\n]*"
    rf"|\s*[\r\n]+|\s+(?![^\s\p{{N}}{_EAST}])|\s+"
)
# A cut at digits before GPT-2's pattern, as StarCoder and SmolLM have it: each digit, or each number.
DIGIT, NUMBER = r"\p{N}", r"\p{N}+"
_AFTER_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# The cuts of a tokenizer.json, in their order -> one pattern for tiktoken.
CUTS = {
    (): NO_SPLIT,
    **{(split,): split for split in (*SPLITS, SPLIT_TEKKEN, SPLIT_QWEN35)},
    CUTS_DEEPSEEK: SPLIT_DEEPSEEK,
    (DIGIT, SPLIT_GPT2): f"{DIGIT}|{_AFTER_DIGITS}",
    (NUMBER, SPLIT_GPT2): f"{NUMBER}|{_AFTER_DIGITS}",
}
# Files of a published model's folder that say how its tokenizer is used: kept with it
# (`companions`).
GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
COMPANIONS = (
    "tokenizer_config.json",
    GENERATION,
    "special_tokens_map.json",
    "chat_template.jinja",
)


def merges(
    ranks: list[bytes], listed: Mapping[bytes, tuple[bytes, bytes]] = MappingProxyType({})
) -> Iterator[tuple[bytes, bytes]]:
    """Return the two tokens that each token is merged from, in the order of ranks, for all tokens
    that merging can make. listed: a guess for some tokens, which makes this three times as fast if
    it is right.

    tiktoken finds the other tokens only by looking up a whole piece of text (Llama 3 has some).
    """
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    # of tokens whose parts have lower ranks, all the way down: (rank, left, right)
    made: dict[bytes, tuple[int, bytes, bytes]] = {}
    for rank, token in enumerate(ranks):
        pair = listed.get(token)
        if pair is None or not _known(pair, made) or not _meet(*pair, rank_of, made):
            pair = _last_pair(token, rank_of)
        if pair is None:
            continue
        if _known(pair, made):
            made[token] = (rank, *pair)
        yield pair


def _known(pair: tuple[bytes, bytes], made: dict) -> bool:
    left, right = pair
    return (len(left) == 1 or left in made) and (len(right) == 1 or right in made)


def _meet(left: bytes, right: bytes, rank_of: dict[bytes, int], made: dict) -> bool:
    """Return whether BPE on the bytes of `left + right` reaches exactly these two tokens before it
    merges them. Both are single bytes or in `made`, so the merges inside each happen in the order
    of ranks. Merges that touch the border between the two are undone, the last first, and a token
    across the border that would have been merged earlier is searched for. Of equal ranks the
    leftmost merges first."""
    while True:
        a, b = made.get(left), made.get(right)
        if a is None and b is None:
            return True
        if b is None or (a is not None and a[0] > b[0]):
            limit = a[0]
            left = a[2]
        else:
            limit = b[0] + 1
            right = b[1]
        if rank_of.get(left + right, limit) < limit:
            return False


def _last_pair(token: bytes, rank_of: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the two parts that merging the bytes of a token ends with; None: more."""
    none = len(rank_of)
    parts = [token[i : i + 1] for i in range(len(token))]
    # of each part with the next
    scores = [rank_of.get(token[i : i + 2], none) for i in range(len(token) - 1)]
    while len(parts) > 2 and (best := min(scores)) < none:
        i = scores.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del scores[i]
        if i < len(scores):
            scores[i] = rank_of.get(parts[i] + parts[i + 1], none)
        if i > 0:
            scores[i - 1] = rank_of.get(parts[i - 1] + parts[i], none)
    return (parts[0], parts[1]) if len(parts) == 2 else None


def files(tokenizer: Tokenizer, longest: int) -> dict[str, dict]:
    """Return the files that `AutoTokenizer` and `generate` read, by name. They give the ids of
    `Tokenizer.encode`.

    There are two differences: the name of a special token in a text becomes that token (the
    convention of `tokenizers`), and a run of more than 100,000 whitespace characters is not cut.
    longest: the length in tokens of the longest text that the model was made for.
    """
    if isinstance(tokenizer, library.LibraryTokenizer):
        return _own_files(tokenizer, longest)
    letters = letters_of_bytes()

    def word(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": id, "content": token, **usual, "special": True}
        for id, token in zip(tokenizer.special_ids, tokenizer.special_tokens, strict=True)
    ]
    # without it, a text begins after the end of the previous one
    begin = tokenizer.begin_of_text or tokenizer.end_of_text
    ids = {row["content"]: row["id"] for row in added}
    vocabulary = {
        word(token): id
        for id, token in zip(tokenizer.ids or range(len(tokenizer.ranks)), tokenizer.ranks)
    }
    if tokenizer.ids:  # special tokens that do not follow the vocabulary keep ids only in it
        vocabulary |= ids
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": _pre_tokenizer(tokenizer.split),
            "post_processor": None,
            "decoder": _byte_level(True),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": True,  # look up a whole piece first, as tiktoken does
                "vocab": vocabulary,
                "merges": [
                    f"{word(left)} {word(right)}" for left, right in merges(tokenizer.ranks)
                ],
            },
        },
        **_settings(begin, tokenizer.end_of_text, ids, longest),
    }


def _settings(begin: str, end: str, ids: dict[str, int], longest: int) -> dict[str, dict]:
    """Return the files that say how a tokenizer is used. ids: of special tokens by name."""
    return {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": longest,
            "bos_token": begin,
            "eos_token": end,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        },
        "generation_config.json": {"bos_token_id": ids[begin], "eos_token_id": ids[end]},
    }


def _own_files(tokenizer: library.LibraryTokenizer, longest: int) -> dict[str, Any]:
    """Return the document as it was read, and its companion files, made where needed."""
    ids = dict(zip(tokenizer.special_tokens, tokenizer.special_ids, strict=True))
    end = tokenizer.end_of_text
    made = _settings(tokenizer.begin_of_text or end, end, ids, longest)
    return {"tokenizer.json": tokenizer.document} | made | dict(tokenizer.companions)


def _byte_level(flag: bool) -> dict:
    flags = {"add_prefix_space": flag, "trim_offsets": True, "use_regex": flag}
    return {"type": "ByteLevel"} | flags


def _pre_tokenizer(split: str) -> dict:
    to_bytes = _byte_level(False)
    if split == NO_SPLIT:
        return to_bytes
    cut = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, to_bytes]}


def read(folder: Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder. Raises InputError."""
    return read_file(folder / "tokenizer.json")


def read_file(path: Path, end: str = "", cache: str | None = None) -> Tokenizer:
    """Read a tokenizer.json. Its companion files say how a text begins and ends, or `end`
    (data.end_token): data/ends.py. cache: data.cache, where the result of a large file's proof is
    kept; None: nowhere. Raises InputError."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file")
    try:
        content = path.read_bytes()
        text, problem = kinds.decoded(content)
        if problem:
            raise InputError(f"it {problem}")
        document = json.loads(text)
        added = {row["id"]: row["content"] for row in document.get("added_tokens") or []}
        begin, end = begin_and_end(path.parent, added, end)
        files = companions(path.parent, set(added))
        parts = {"document": document, "beside": files}
        make = functools.partial(opened, document, (begin, end), files)
        if cache is None or len(content) < kept_proofs.LEAST:
            return make()
        return kept_proofs.opened(kept_proofs.path_of(content, begin, end, cache), parts, make)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise InputError(f"{path} is not a tokenizer that can be read: {reason}") from None


def _are_in(ids: Any, known: set[int]) -> bool:
    """Return whether the token ids of config.json, one or several, are in the vocabulary. Its
    default, 2, is often the id of an ordinary word."""
    every = ids if isinstance(ids, list) else [ids]
    return bool(every) and all(type(id) is int and id in known for id in every)


def companions(folder: Path, ids: set[int]) -> dict[str, Any]:
    """Read the files of COMPANIONS that a folder has: as JSON, or the text of a template. Tokens
    that only config.json names, as in older folders, count as those of generation_config.json. ids:
    of the added tokens. Raises OSError, and ValueError for one that is not JSON."""
    found = {}
    for name in COMPANIONS:
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            found[name] = json.loads(text) if name.endswith(".json") else text
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tokens = {key: config[key] for key in TOKENS if _are_in(config.get(key), ids)}
        if tokens:
            found[GENERATION] = tokens | found.get(GENERATION, {})
    return found


def opened(
    document: dict, ends: tuple[str | None, str], companions: dict[str, Any]
) -> library.LibraryTokenizer:
    """Build the tokenizer of a parsed tokenizer.json, run by tiktoken where that is proved to make
    the same ids. ends: the names of the tokens that begin and end a text. Raises InputError if
    the library cannot read it, KeyError if one of the ends is none of its added tokens."""
    model = document["model"]
    if model.get("dropout"):
        raise ValueError(
            f"its model has dropout = {model['dropout']!r}, so a text has other tokens each time: "
            "set it to null in the file"
        )
    _check_prefix(model)
    made = library.build(document)
    added = library.added_by(made)
    try:
        proof = prove(document, added)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"{error} is unknown" if isinstance(error, KeyError) else str(error)
        return library.LibraryTokenizer(document, added, ends, companions, None, reason)
    tok = library.LibraryTokenizer(document, added, ends, companions, proof)
    if tok.has_other_ids(made):
        return tok.by_library("a text of many scripts has other ids in `tokenizers`")
    return tok


def _check_prefix(model: dict) -> None:
    """Raise ValueError for merges without the prefix that they should have: `tokenizers` cuts as many
    bytes off them all the same, and ends the process where that is inside a character."""
    prefix = model.get("continuing_subword_prefix")
    if not prefix or "merges" not in model:
        return
    for pair in model["merges"]:
        right = pair.partition(" ")[2] if isinstance(pair, str) else pair[1]
        if not right.startswith(prefix):
            raise ValueError(
                f"its model has continuing_subword_prefix = {prefix!r}, and the merge {pair!r} "
                "is without it"
            )


def prove(document: dict, added: list[Added]) -> Proof:
    """Return the ranks and the regular expression with which tiktoken gives the ids of
    `tokenizers`. Raises ValueError, with the reason, if nothing shows that they would be the same,
    and KeyError, TypeError or the like for a document of another shape."""
    model = document["model"]
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"it is a {model['type']} model, not a byte-level BPE")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ValueError(f"its model has {key} = {model[key]!r}")
    nfc = _normalizes(document)
    cuts = _cuts_of(document["pre_tokenizer"])
    if cuts not in CUTS:
        raise ValueError(f"nothing shows that its cuts mean the same in tiktoken: {cuts!r:.200}")
    split = CUTS[cuts]
    for row in added:
        if row.greedy and not row.special:
            raise ValueError(f"its added token {row.name!r} depends on the characters around it")
        if nfc and row.normalized and not unicodedata.is_normalized("NFC", row.name):
            raise ValueError(f"its added token {row.name!r} is not in NFC")
    byte_of = {letter: byte for byte, letter in enumerate(letters_of_bytes())}

    @functools.cache
    def token(word: str) -> bytes:
        return bytes([byte_of[letter] for letter in word])

    special = {row.name: row.id for row in added}
    vocabulary = {token(word): id for word, id in model["vocab"].items() if special.get(word) != id}
    ids = [*vocabulary.values(), *special.values()]
    if len(set(ids)) != len(ids) or len(special) != len(added) or min(ids) < 0:
        raise ValueError("several of its tokens have the same id")
    if max(ids) > 2 * len(ids) + 1000:
        raise ValueError(f"its ids have gaps: {len(ids)} tokens, the highest id is {max(ids)}")
    lacking = {bytes([byte]) for byte in range(256)} - vocabulary.keys()
    for row in document["added_tokens"]:  # tokenizers may give them other ids than the file
        if special.get(row["content"]) != row["id"]:
            raise ValueError(
                f"its added token {row['content']!r} has an id that tokenizers changes"
            )
    pairs = [
        tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]
    ]
    pairs = [(token(left), token(right)) for left, right in pairs]
    if split == NO_SPLIT and len(vocabulary) > 256:
        raise ValueError("it does not cut texts at all")
    if lacking and model.get("unk_token"):
        raise ValueError("it has a token for bytes that it lacks")
    ranks = _ranks(vocabulary, pairs, bool(model.get("ignore_merges")))
    only_special = all(row.special for row in added)
    plain = only_special and not nfc and not lacking and split in (*SPLITS, NO_SPLIT)
    return Proof(ranks, [vocabulary[token] for token in ranks], split, nfc, plain)


def _normalizes(document: dict) -> bool:
    """Return whether texts are normalised to NFC. Raises ValueError for any other normalizer."""
    steps = library.steps_of(document.get("normalizer"), "normalizers")
    other = [step["type"] for step in steps if step["type"] != "NFC"]
    if other:
        raise ValueError(f"it changes texts first (normalizer {other[0]})")
    return bool(steps)


def _cuts_of(pre: dict) -> tuple[str, ...]:
    """Return the patterns by which a text is cut, one after another, before it becomes bytes."""
    *cuts, to_bytes = library.steps_of(pre, "pretokenizers")
    if to_bytes["type"] != "ByteLevel":
        raise ValueError(
            f"it is not a byte-level BPE (its pre-tokenizer ends in {to_bytes['type']})"
        )
    if to_bytes.get("add_prefix_space", True):
        raise ValueError("it puts a space before a text")
    patterns = [_pattern_of(cut) for cut in cuts]
    if to_bytes.get("use_regex", True):
        patterns.append(SPLIT_GPT2)
    return tuple(patterns)


def _pattern_of(cut: dict) -> str:
    """Return the pattern whose matches, with the text between them, are the pieces of a cut."""
    if cut["type"] == "Digits":
        return DIGIT if cut["individual_digits"] else NUMBER
    if cut["type"] != "Split":
        raise ValueError(f"it cuts texts by {cut['type']}")
    pattern = cut["pattern"]["Regex"]
    for spelling, usual in ("\r", r"\r"), ("\n", r"\n"), (r"\"", '"'):  # of the same
        pattern = pattern.replace(spelling, usual)
    isolated = cut["behavior"] == "Isolated" and not cut["invert"]
    # what the pattern does not match is removed: nothing, as it matches every text from end to end
    removes_nothing = cut["behavior"] == "Removed" and cut["invert"] and pattern in SPLITS
    if not (isolated or removes_nothing):
        raise ValueError(f"its cuts have the behavior {cut['behavior']}")
    return pattern


def _ranks(
    vocabulary: dict[bytes, int], pairs: list[tuple[bytes, bytes]], look_up: bool
) -> list[bytes]:
    """Find an order of the vocabulary in which merging by rank equals merging by the list of pairs:
    the order of the ids if possible, otherwise that of the list. By the argument at the top, both
    are equal if the pair that each token is made of by rank is in the list, and these pairs are in
    order there. Other pairs in the list never meet (Llama 3's file has some).

    look_up: a whole piece of text that is a token becomes that token even if merging would not make
    it (ignore_merges). Without it, such tokens are left out, because nothing makes them. Raises
    ValueError if there is no such order."""
    by_id = sorted(vocabulary, key=vocabulary.__getitem__)
    # of equal pairs the first counts
    position = {pair: i for i, pair in reversed(list(enumerate(pairs)))}
    made = dict.fromkeys(left + right for left, right in pairs)
    if not made.keys() <= vocabulary.keys():
        raise ValueError("its merges make tokens that are not in its vocabulary")
    letters = [token for token in by_id if len(token) == 1]
    unmade = [token for token in by_id if len(token) > 1 and token not in made]
    by_list = [*letters, *made, *(unmade if look_up else [])]
    for ranks in [by_id] if by_list == by_id else [by_id, by_list]:
        count = _count_in_order(ranks, position)
        if count >= 0 and (look_up or count + len(letters) == len(ranks)):
            return ranks
    if not look_up and unmade:
        raise ValueError(
            "it has tokens that its merges cannot make, or its merges are not in the order of its "
            "vocabulary"
        )
    raise ValueError("its merges are not in the order of its vocabulary, nor of their own")


def _count_in_order(ranks: list[bytes], position: dict[tuple[bytes, bytes], int]) -> int:
    """Count the tokens that merging by these ranks makes; -1 if the pairs that it needs are not all
    in the list, in the order of their `position` there."""
    count = 0
    last = -1
    listed = {left + right: (left, right) for left, right in position}
    for pair in merges(ranks, listed):
        place = position.get(pair, -1)
        if place < last or place < 0:
            return -1
        last = place
        count += 1
    return count
