"""Incremental detokenization gives the text of all tokens, and stops at stop texts."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from vmkv.serve.detokenize import Detokenizer
from vmkv.serve.params import SamplingParams

CORPUS = ["the cat sat on the mat. END of the story, naïve café, 猫 👋🏽"] * 3


def _byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's: a character may be several tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    inner.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def _byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: the first word loses its space; unknown characters are bytes."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.,END", "▁the", "▁cat", "<s>"]:
        vocabulary.setdefault(piece, len(vocabulary))
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    inner.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>")


def _word_piece() -> PreTrainedTokenizerFast:
    """A tokenizer like BERT's: each token that is no continuation has a space before it."""
    words = ["[UNK]", "the", "cat", "##s", "sat", ",", "END", "##ED"]
    inner = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}))
    inner.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


TOKENIZERS = {
    "byte-level": _byte_level(),
    "byte-fallback": _byte_fallback(),
    "word-piece": _word_piece(),
}
TEXT = "naïve 猫猫猫 cat 👋🏽👋🏽👋🏽👋🏽 the café. " * 4


def _decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


class Collecting(Detokenizer):
    """A detokenizer that keeps all text it has returned."""

    _text = ""

    @property
    def text(self) -> str:
        self._text += self.take_text()
        return self._text


def _run(
    tokenizer: PreTrainedTokenizerFast, prompt: list[int], ids: list[int], **params: object
) -> tuple[Collecting, list[str]]:
    """Detokenize `ids`, up to a stop; the detokenizer, and the text after each token."""
    detokenizer = Collecting(tokenizer, prompt, SamplingParams(**params))
    texts = []
    for token_id in ids:
        stop = detokenizer.append(token_id)
        texts.append(detokenizer.text)
        if stop is not None:
            break
    return detokenizer, texts


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize("split", [0, 1, 2, 3, 5, 8, 13, 17, 40])
def test_prompt_and_output_join_to_the_text(name: str, split: int) -> None:
    """Wherever the prompt ends; no output has an incomplete character."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    while name == "byte-fallback" and "\ufffd" in _decode(tokenizer, ids[:split]):
        split -= 1  # The decoder also replaces whole characters before a part of one.
    prompt, output = ids[:split], ids[split:]
    detokenizer, texts = _run(tokenizer, prompt, output)
    detokenizer.finish()
    # A prompt that ends within a character leaves all of that character to the output.
    shown = _decode(tokenizer, prompt).rstrip("\ufffd")
    assert TEXT == shown + detokenizer.text
    for before, after in zip(["", *texts], texts, strict=False):
        assert after.startswith(before), "text that was returned changed"
    assert not any("\ufffd" in text for text in texts)


def test_words_are_joined_with_the_tokenizers_spaces() -> None:
    """The first word of an output has its space, too."""
    tokenizer = TOKENIZERS["word-piece"]
    detokenizer, texts = _run(tokenizer, [1], [2, 3, 4, 5, 1])
    assert [" cat", " cats", " cats sat", " cats sat ,", " cats sat , the"] == texts
    detokenizer.finish()
    assert " cats sat , the" == detokenizer.text


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer that changes the decoded text, as Whisper's does."""

    def _decode(self, *arguments: object, **options: object) -> str:
        return str(super()._decode(*arguments, **options)).upper()


def test_custom_decoding_is_used() -> None:
    """Of a tokenizer's class, or set on the tokenizer."""
    plain = TOKENIZERS["byte-level"]
    ids = plain.encode("the cat", add_special_tokens=False)
    inner = plain.backend_tokenizer
    assert _run(Shouting(tokenizer_object=inner), [], ids)[0].text == "THE CAT"
    patched = PreTrainedTokenizerFast(tokenizer_object=inner)
    patched.decode = lambda token_ids, **options: "x" * len(token_ids)
    assert _run(patched, [], ids)[0].text == "x" * len(ids)


@given(ids=st.lists(st.integers(2, 289), max_size=120), data=st.data())
def test_random_tokens_join_to_the_text(ids: list[int], data: st.DataObject) -> None:
    """Invalid bytes become replacement characters."""
    tokenizer = TOKENIZERS["byte-level"]
    split = data.draw(st.integers(0, len(ids)))
    detokenizer, texts = _run(tokenizer, ids[:split], ids[split:])
    detokenizer.finish()
    shown = _decode(tokenizer, ids[:split]).rstrip("\ufffd")
    assert _decode(tokenizer, ids) == shown + detokenizer.text
    for before, after in zip(["", *texts], texts, strict=False):
        assert after.startswith(before)


FALLBACK = TOKENIZERS["byte-fallback"]
WORDS = FALLBACK.convert_tokens_to_ids
BYTES = {1 + byte: byte for byte in range(256)}
#: Complete characters, parts of characters, and invalid bytes.
PIECES = ["🙂", "猫", "é", "a", "▁", "▁the", "E", "N", "D", ".", "<s>"]
RUNS = [[WORDS(f"<0x{byte:02X}>") for byte in each.encode()] for each in PIECES[:3]]
FALLBACK_IDS = st.lists(
    st.one_of(
        st.sampled_from(RUNS),
        st.sampled_from([run[:at] for run in RUNS for at in range(1, len(run))]),
        st.sampled_from([[WORDS("<0xFF>")], [WORDS("<0x82>")]]),
        st.sampled_from(PIECES[3:]).map(lambda piece: [WORDS(piece)]),
        st.integers(1, 12).map(lambda count: [WORDS("<s>")] * count),
    ),
    max_size=40,
).map(lambda pieces: [each for piece in pieces for each in piece])


def _with_replacements(ids: list[int]) -> list[int]:
    """Tokens of the documented text, with replacement characters for invalid bytes."""
    made, run = [], []
    special = WORDS("<s>")
    for token_id in [*(each for each in ids if each != special), None]:
        if token_id in BYTES:
            run.append(BYTES[token_id])
            continue
        known = len(run)
        while known and not _is_text(bytes(run[:known])):
            known -= 1
        text = bytes(run[:known]) + "\ufffd".encode() * (len(run) - known)
        made += [1 + byte for byte in text]
        run = []
        made += [] if token_id is None else [token_id]
    return made


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(ids=FALLBACK_IDS, data=st.data())
@example(ids=[*WORDS(["▁the"]), *RUNS[0], RUNS[0][0], *WORDS(["▁the", "E", "N"])], data=None)
@example(ids=[*WORDS(["▁the"]), *[WORDS("<s>")] * 20, *WORDS(["▁the"])], data=None)
@example(ids=[WORDS("<0xFF>"), *RUNS[1] * 70, *WORDS(["▁the"])], data=None)
@example(ids=[*[WORDS("<0xFF>")] * 3, *RUNS[1] * 70, *WORDS(["▁the"])], data=None)
@example(ids=[*[WORDS("<0xFF>")] * 2, *RUNS[0] * 50, *WORDS(["▁the"])], data=None)
@example(ids=[*RUNS[1] * 70, *RUNS[1][:2] * 60, *WORDS(["▁the"])], data=None)
def test_random_bytes_join_to_the_text(ids: list[int], data: st.DataObject | None) -> None:
    """With a byte fallback; text is returned at most three characters late."""
    split = data.draw(st.integers(0, min(len(ids), 80))) if data else 0
    prompt = _decode(FALLBACK, _with_replacements(ids[:split]))
    assume(not prompt.endswith("\ufffd"))  # Otherwise, the output repeats the prompt's end.
    detokenizer, texts = _run(FALLBACK, ids[:split], ids[split:])
    for at, text in enumerate(texts, split + 1):
        so_far = FALLBACK.decode(_with_replacements(ids[:at]), skip_special_tokens=True)
        assert (prompt + text).rstrip("\ufffd") == so_far.rstrip("\ufffd")
        assert len(so_far) - len(prompt + text) <= 3
    detokenizer.finish()
    whole = FALLBACK.decode(_with_replacements(ids), skip_special_tokens=True)
    assert whole == prompt + detokenizer.text


@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    fallback_ids=FALLBACK_IDS,
    other_ids=st.lists(st.integers(0, 289), max_size=60),
    stops=st.lists(st.text("END. t\ufffd", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_output_ends_at_the_first_stop_text(
    name: str, fallback_ids: list[int], other_ids: list[int], stops: list[str]
) -> None:
    """At the first token that completes one, with every decoder."""
    tokenizer = TOKENIZERS[name]
    ids = fallback_ids if name == "byte-fallback" else [each % len(tokenizer) for each in other_ids]
    plain, texts = _run(tokenizer, [], ids)
    plain.finish()
    texts = ["", *texts, plain.text]
    pieces = [after[len(before) :] for before, after in itertools.pairwise(texts)]
    text, stop, shown = naive(pieces, stops)
    detokenizer, found = _run(tokenizer, [], ids, stop=stops)
    if detokenizer.stop is None:
        detokenizer.finish()
        found.append(detokenizer.text)
        shown[len(ids) :] = [text]
    assert (text, stop, shown) == (detokenizer.text, detokenizer.stop, found)


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("stop", ["END", "t. E", "mat. END of", "on", ". "])
def test_stop_texts_are_found_across_tokens(stop: str, includes: bool) -> None:
    """Text from the stop text on is not returned."""
    tokenizer = TOKENIZERS["byte-level"]
    text = " sat on the mat. END of the story"
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer, texts = _run(
        tokenizer,
        tokenizer.encode("the cat"),
        ids,
        stop=["zzz", stop],
        include_stop_str_in_output=includes,
    )
    expected = text[: text.index(stop) + (len(stop) if includes else 0)]
    assert stop == detokenizer.stop
    assert expected == detokenizer.text
    assert all(expected.startswith(each) for each in texts)
    detokenizer.finish()
    assert expected == detokenizer.text


def test_incomplete_bytes_are_text_at_the_end() -> None:
    """They may complete a stop text."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("at €", add_special_tokens=False)
    detokenizer, _ = _run(tokenizer, [], ids[:-1], stop="t €")
    assert "a" == detokenizer.text
    assert detokenizer.finish() is None
    assert tokenizer.decode(ids[:-1]) == detokenizer.text
    detokenizer, _ = _run(tokenizer, [], ids[:-1], stop="t \ufffd")
    assert "t \ufffd" == detokenizer.finish()
    assert "a" == detokenizer.text


def test_stop_texts_wait_for_min_tokens() -> None:
    """A stop text that is complete before `min_tokens` does not count."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = [tokenizer.encode(each, add_special_tokens=False)[0] for each in "ENDaEND"]
    detokenizer, texts = _run(tokenizer, [], ids, stop="END", min_tokens=5)
    assert "ENDa" == detokenizer.text
    assert 7 == len(texts)


def test_skip_special_tokens() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = [*tokenizer.encode("cat", add_special_tokens=False), 1]
    assert "cat" == _run(tokenizer, [], ids)[0].text
    assert "cat</s>" == _run(tokenizer, [], ids, skip_special_tokens=False)[0].text


# ---- cost of stop texts -------------------------------------------------------------------------


def naive(pieces: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    """Text, stop text, and the text after each piece, by a search from the start each time."""
    text, shown = "", []
    for piece in pieces:
        before, text = len(text), text + piece
        ends = [
            (at, stop)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > before
        ]
        if ends:
            at, stop = min(ends)
            return text[:at], stop, [*shown, text[:at]]
        begun = [
            length
            for stop in stops
            for length in range(1, len(stop))
            if text.endswith(stop[:length])
        ]
        shown.append(text[: len(text) - max(begun, default=0)])
    return text, None, shown


class Letters:
    """A tokenizer whose tokens are one to three letters."""

    TOKENS = ("", "a", "b", "c", "ab", "ba", "abc", "cab")

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(self.TOKENS[each] for each in token_ids)


@given(
    ids=st.lists(st.integers(1, 7), max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5),
)
def test_stop_texts_are_found_as_by_a_naive_search(ids: list[int], stops: list[str]) -> None:
    """Overlapping stop texts, and stop texts within others."""
    detokenizer, texts = _run(Letters(), [], ids, stop=stops)
    detokenizer.finish()
    expected = naive([Letters.TOKENS[each] for each in ids], stops)
    assert expected == (detokenizer.text, detokenizer.stop, texts)


def test_the_cost_of_a_token_does_not_depend_on_stop_texts() -> None:
    """Neither on their length, nor on how much of one is matched."""

    def num_calls(stops: list[str], *ids: int) -> int:
        detokenizer = Detokenizer(Letters(), [], SamplingParams(stop=stops))
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for at in range(2000):
                assert detokenizer.append(ids[at % len(ids)]) is None
        finally:
            sys.setprofile(None)
        return calls

    short = num_calls(["abc", "aa", "bb"], 1, 2)
    long = num_calls(["abc", "ab" * 3000, "ba" * 3000 + "c"], 1, 2)
    assert long < 1.5 * short
    again = num_calls(["a" * 999 + "b", "a" * 10 + "c" * 990, "a" * 99 + "bc"], 1)
    assert again < 1.5 * short
