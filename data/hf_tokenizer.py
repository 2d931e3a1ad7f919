"""A `Tokenizer` as the files of Hugging Face's `tokenizers`, and back, without that library.

Both run byte-level BPE, described differently. tiktoken (and `Tokenizer`) keeps ranks: two neighbours may merge
whenever their concatenation is a token, lowest rank first. `tokenizers` keeps a list of merges: pairs, earliest in the
list first. `merges` derives that list, so that both do the same to every text.

Why it is the same: consider a token T and what merging does inside the bytes that become T, in any text. No merge
crosses the borders of T, and of those inside the lowest rank comes first, leftmost among equals; so they are the
merges, in the order, that T's bytes alone would get. The last pair before T is therefore the same wherever T is made,
and the list of these pairs, in the order of ranks, allows exactly the merges that happen by rank.
"""

import json
from pathlib import Path

from configs.schema import InputError
from data.tokenizer import NO_SPLIT, SPLIT, Tokenizer

BEGIN = "<|begin_of_text|>"  # Llama 3's; where a vocabulary has none, a text begins after the end of another one


def merges(ranks: list[bytes]) -> list[tuple[bytes, bytes]]:
    """For each token that merging can make, in the order of ranks, the two that it is made of.

    A token that is not here is one that tiktoken finds only by looking up a whole piece of text (Llama 3 has some).
    """
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    none = len(ranks)
    found = []
    for token in ranks:
        parts = [token[i : i + 1] for i in range(len(token))]
        scores = [rank_of.get(token[i : i + 2], none) for i in range(len(token) - 1)]  # of each part with the next
        while len(parts) > 2 and (best := min(scores)) < none:
            i = scores.index(best)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
            del scores[i]
            if i < len(scores):
                scores[i] = rank_of.get(parts[i] + parts[i + 1], none)
            if i > 0:
                scores[i - 1] = rank_of.get(parts[i - 1] + parts[i], none)
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


def characters() -> list[str]:
    """The printable character that stands for each byte in a vocabulary of `tokenizers`: itself where it is printable
    in Latin-1, otherwise the next one from U+0100 on (GPT-2's invention: openai/gpt-2, encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def files(tokenizer: Tokenizer, longest: int) -> dict[str, dict]:
    """What `AutoTokenizer` and `generate` read, by file name; the ids are those of `Tokenizer.encode`.

    Two things differ: a special token's name in a text is that token (the convention of `tokenizers`), and a run of
    more than 100,000 whitespace characters is not cut. longest: tokens of the longest text that the model was made for.
    """
    letters = characters()

    def word(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    first = len(tokenizer.ranks)
    added = [
        {"id": first + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, token in enumerate(tokenizer.special_tokens)
    ]  # fmt: skip
    begin = BEGIN if BEGIN in tokenizer.special_tokens else tokenizer.end_of_text
    ids = {row["content"]: row["id"] for row in added}
    return {
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": _pre_tokenizer(tokenizer.split), "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                "ignore_merges": True,  # look up a whole piece first, as tiktoken does
                "vocab": {word(token): rank for rank, token in enumerate(tokenizer.ranks)},
                "merges": [f"{word(left)} {word(right)}" for left, right in merges(tokenizer.ranks)],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest,
            "bos_token": begin, "eos_token": tokenizer.end_of_text, "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        },
        "generation_config.json": {"bos_token_id": ids[begin], "eos_token_id": ids[tokenizer.end_of_text]},
    }  # fmt: skip


def _pre_tokenizer(split: str) -> dict:
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    if split == NO_SPLIT:
        return to_bytes
    cut = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, to_bytes]}


def read(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, where ours gives the same ids for every text: Llama 3's kind.

    Raises InputError for any other kind (Llama 2's SentencePiece), and for a folder that has none.
    """
    path = folder / "tokenizer.json"
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return _read(document, _end_of_text(folder, document))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise InputError(f"{path} is not a tokenizer that can be converted: {what}") from None


def _end_of_text(folder: Path, document: dict) -> str:
    """The name of the token that ends a text: by tokenizer_config.json, or by its id in config.json."""
    path = folder / "tokenizer_config.json"
    token = json.loads(path.read_text(encoding="utf-8")).get("eos_token") if path.is_file() else None
    if token is None:
        ids = json.loads((folder / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
        first = ids[0] if isinstance(ids, list) else ids
        token = [row["content"] for row in document["added_tokens"] if row["id"] == first][0]
    return token["content"] if isinstance(token, dict) else token


def _read(document: dict, end_of_text: str) -> Tokenizer:
    """Raises ValueError, with the reason, where ours would not give the same ids."""
    model, pre = document["model"], document["pre_tokenizer"]
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ValueError(f"its model has {key} = {model[key]!r}")
    if model.get("type") != "BPE" or document.get("normalizer"):
        raise ValueError("it is not a byte-level BPE")
    parts = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    split = parts[0]["pattern"]["Regex"] if parts[0]["type"] == "Split" else NO_SPLIT
    kept = ("type", "pattern", "behavior", "invert", "add_prefix_space", "use_regex")
    expected = _pre_tokenizer(split).get("pretokenizers", [_pre_tokenizer(split)])
    if split not in (SPLIT, NO_SPLIT) or [{k: p[k] for k in kept if k in p} for p in parts] != [
        {k: p[k] for k in kept if k in p} for p in expected
    ]:
        raise ValueError("it cuts texts in another way than Llama 3")

    byte_of = {letter: byte for byte, letter in enumerate(characters())}
    vocabulary = {bytes(byte_of[letter] for letter in word): rank for word, rank in model["vocab"].items()}
    ranks = sorted(vocabulary, key=vocabulary.__getitem__)
    if list(vocabulary[token] for token in ranks) != list(range(len(ranks))):
        raise ValueError("the ids of its vocabulary have gaps")
    special = sorted(document["added_tokens"], key=lambda row: row["id"])
    if [row["id"] for row in special] != [len(ranks) + i for i in range(len(special))]:
        raise ValueError("its added tokens are not numbered after its vocabulary")
    if not {bytes([byte]) for byte in range(256)} <= vocabulary.keys():
        raise ValueError("its vocabulary lacks some of the 256 bytes")

    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    made = [vocabulary[bytes(byte_of[letter] for letter in left + right)] for left, right in pairs]
    there = {(bytes(byte_of[c] for c in left), bytes(byte_of[c] for c in right)) for left, right in pairs}
    needed = merges(ranks)
    # More merges than needed are harmless, since by the argument above their pairs never meet; Llama 3's file has them.
    if made != sorted(made) or not there.issuperset(needed):
        raise ValueError("its merges are not in the order of its vocabulary")
    if not model.get("ignore_merges") and len(needed) + 256 < len(ranks):
        raise ValueError("it has tokens that its merges cannot make")
    return Tokenizer(ranks, split, [row["content"] for row in special], end_of_text)
