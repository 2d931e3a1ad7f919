"""Writes a `Tokenizer` as the files of Hugging Face's `tokenizers`, and reads them, without that
library.

Both run byte-level BPE, but they describe it differently. tiktoken (and `Tokenizer`) keeps ranks:
two neighbours may merge whenever their concatenation is a token, the lowest rank first.
`tokenizers` keeps a list of merges: pairs, the earliest in the list first. `merges` derives that
list, so that both do the same to every text.

Why it is the same: consider a token T, and what merging does in any text inside the bytes that
become T. No merge crosses the borders of T. Of the merges inside, the lowest rank comes first, and
the leftmost among equals. So they are the merges, in the same order, that the bytes of T alone
would get. The last pair before T is therefore the same wherever T is made, and the list of these
pairs, in the order of ranks, allows exactly the merges that happen by rank. `_ranks` goes from such
a list back to ranks.
"""

import json
from pathlib import Path

from configs.schema import InputError
from data.ends import begin_and_end
from data.tokenizer import (
    NO_SPLIT,
    SPLIT,
    SPLIT_CL100K,
    SPLIT_GPT2,
    SPLIT_O200K,
    SPLIT_QWEN2,
    Tokenizer,
    gpt2_bytes,
)

# Patterns that mean the same in the regular expressions of tiktoken and tokenizers, and that match
# every text from end to end (tiktoken drops what lies between two matches). Other patterns are
# refused, because nobody has compared them.
SPLITS = (SPLIT, SPLIT_CL100K, SPLIT_GPT2, SPLIT_O200K, SPLIT_QWEN2)


def merges(ranks: list[bytes]) -> list[tuple[bytes, bytes]]:
    """The two tokens that each token is made of, in the order of ranks, for all tokens that merging
    can make.

    tiktoken finds the other tokens only by looking up a whole piece of text (Llama 3 has some).
    """
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    none = len(ranks)
    pairs = []
    for token in ranks:
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
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
    return pairs


def characters() -> list[str]:
    """The printable character that stands for each byte in a vocabulary of `tokenizers`: the byte
    itself if it is printable in Latin-1, otherwise the next character from U+0100 on (as in GPT-2:
    openai/gpt-2, encoder.py)."""
    order = [token[0] for token in gpt2_bytes()]
    letter_of = {byte: chr(byte) if i < 188 else chr(256 + i - 188) for i, byte in enumerate(order)}
    return [letter_of[byte] for byte in range(256)]


def files(tokenizer: Tokenizer, longest: int) -> dict[str, dict]:
    """The files that `AutoTokenizer` and `generate` read, by name. They give the ids of
    `Tokenizer.encode`.

    There are two differences: the name of a special token in a text becomes that token (the
    convention of `tokenizers`), and a run of more than 100,000 whitespace characters is not cut.
    longest: the length in tokens of the longest text that the model was made for.
    """
    letters = characters()

    def word(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    added = [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
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
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
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
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": longest,
            "bos_token": begin,
            "eos_token": tokenizer.end_of_text,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        },
        "generation_config.json": {
            "bos_token_id": ids[begin],
            "eos_token_id": ids[tokenizer.end_of_text],
        },
    }


def _pre_tokenizer(split: str) -> dict:
    to_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    if split == NO_SPLIT:
        return to_bytes
    cut = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, to_bytes]}


def read(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises InputError for any kind that ours cannot
    reproduce exactly (such as Llama 2's SentencePiece), and for a folder without a tokenizer."""
    return read_file(folder / "tokenizer.json")


def read_file(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. The files beside it say how a text begins and ends. It
    gives the same ids for every text that has no name of a special token in it (which we take as
    ordinary text)."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return _read(document, *begin_and_end(path.parent, document))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise InputError(f"{path} is not a tokenizer that can be converted: {reason}") from None


def _read(document: dict, begin: str | None, end: str) -> Tokenizer:
    """Raises ValueError, with the reason, if ours would not give the same ids."""
    model = document["model"]
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"it is a {model['type']} model, not a byte-level BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ValueError(f"its model has {key} = {model[key]!r}")
    if document.get("normalizer"):
        raise ValueError(
            f"it changes texts first (normalizer {document['normalizer'].get('type')}); it is not "
            "a byte-level BPE that gives every text back"
        )
    split = _split_of(document["pre_tokenizer"])

    added = sorted(document["added_tokens"], key=lambda row: row["id"])
    for row in added:
        if not row.get("special") and not (
            row["content"][:1] == "<" and row["content"][-1:] == ">"
        ):
            raise ValueError(f"its added token {row['content']!r} would be found in ordinary text")
    byte_of = {letter: byte for byte, letter in enumerate(characters())}

    def token(word: str) -> bytes:
        return bytes(byte_of[letter] for letter in word)

    special = {row["content"]: row["id"] for row in added}
    vocabulary = {token(word): id for word, id in model["vocab"].items() if special.get(word) != id}
    ids = [*vocabulary.values(), *special.values()]
    if len(set(ids)) != len(ids) or len(special) != len(added) or min(ids) < 0:
        raise ValueError("several of its tokens have the same id")
    if max(ids) > 2 * len(ids) + 1000:
        raise ValueError(f"its ids have gaps: {len(ids)} tokens, the highest id is {max(ids)}")
    if not {bytes([byte]) for byte in range(256)} <= vocabulary.keys():
        raise ValueError("its vocabulary lacks some of the 256 bytes")
    following = len(model["vocab"])
    for name, id in special.items():  # tokenizers numbers them so, whatever the file says
        if model["vocab"].get(name, following) != id:
            raise ValueError(
                f"its added token {name!r} has the id {id}, but tokenizers makes it "
                f"{model['vocab'].get(name, following)}"
            )
        following += name not in model["vocab"]
    pairs = [
        tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]
    ]
    pairs = [(token(left), token(right)) for left, right in pairs]
    if split == NO_SPLIT and len(vocabulary) > 256:
        raise ValueError("it cuts texts in another way: not at all")
    ranks = _ranks(vocabulary, pairs, bool(model.get("ignore_merges")))
    return Tokenizer(
        ranks,
        split,
        list(special),
        end,
        [*(vocabulary[t] for t in ranks), *special.values()],
        begin,
    )


def _split_of(pre: dict) -> str:
    """The pattern of a pre-tokenizer that splits by a pattern and then into bytes (as
    `_pre_tokenizer` writes it, or GPT-2's)."""
    parts = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    to_bytes = parts[-1]
    if to_bytes["type"] != "ByteLevel":
        raise ValueError(
            f"it is not a byte-level BPE (its pre-tokenizer ends in {to_bytes['type']})"
        )
    split = SPLIT_GPT2 if to_bytes.get("use_regex", True) else NO_SPLIT
    if len(parts) == 2 and split == NO_SPLIT and parts[0]["type"] == "Split":
        isolated = parts[0]["behavior"] == "Isolated" and not parts[0]["invert"]
        split = parts[0]["pattern"].get("Regex") if isolated else None
    elif len(parts) > 1:
        split = None
    if to_bytes.get("add_prefix_space", True) or split not in (*SPLITS, NO_SPLIT):
        raise ValueError("it cuts texts in another way than Llama 3, GPT-2, o200k or Qwen 2")
    return split


def _ranks(
    vocabulary: dict[bytes, int], pairs: list[tuple[bytes, bytes]], look_up: bool
) -> list[bytes]:
    """An order of the vocabulary in which merging by rank equals merging by the list of pairs: the
    order of the ids if possible, otherwise that of the list. By the argument at the top, both are
    equal if the pair that each token is made of by rank is in the list, and these pairs are in
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
        needed = merges(ranks)
        places = [position.get(pair, -1) for pair in needed]
        if (
            -1 not in places
            and places == sorted(places)
            and (look_up or len(needed) + 256 == len(ranks))
        ):
            return ranks
    if not look_up and unmade:
        raise ValueError(
            "it has tokens that its merges cannot make, or its merges are not in the order of its "
            "vocabulary"
        )
    raise ValueError("its merges are not in the order of its vocabulary, nor of their own")
