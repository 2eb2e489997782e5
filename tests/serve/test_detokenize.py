"""Text that arrives token by token is the text of all tokens, and ends where it must."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vmkv.serve import SamplingParams
from vmkv.serve.detokenize import Detokenizer

CORPUS = ["the cat sat on the mat. END of the story, naïve café, 猫 👋🏽"] * 3


def _byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: a character may be several tokens."""
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
    """Llama-2's kind: words begin with a space that the first one loses; bytes where unknown."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.,END", "▁the", "▁cat"]:
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
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def _word_piece() -> PreTrainedTokenizerFast:
    """BERT's kind: a space stands before every token that is no continuation."""
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
    """Keeps what it gave out."""

    _text = ""

    @property
    def text(self) -> str:
        self._text += self.take_text()
        return self._text


def _run(
    tokenizer: PreTrainedTokenizerFast, prompt: list[int], ids: list[int], **params: object
) -> tuple[Collecting, list[str]]:
    """The detokenizer after `ids`, or its stop, and the text after each."""
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
def test_pieces_join_to_the_whole(name: str, split: int) -> None:
    """Wherever the prompt ends, prompt and output together are the text; nothing is half."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    while name == "byte-fallback" and "\ufffd" in _decode(tokenizer, ids[:split]):
        split -= 1  # It takes back whole characters before half a one: there is no right answer.
    prompt, output = ids[:split], ids[split:]
    detokenizer, texts = _run(tokenizer, prompt, output)
    detokenizer.finish()
    # A prompt that ends within a character leaves all of that character to the output.
    shown = _decode(tokenizer, prompt).rstrip("\ufffd")
    assert TEXT == shown + detokenizer.text
    for before, after in zip(["", *texts], texts, strict=False):
        assert after.startswith(before), "text that was given out stays"
    assert not any("\ufffd" in text for text in texts)


def test_words_are_joined_as_the_tokenizer_does() -> None:
    """A tokenizer whose spaces depend on the token before: the first word has its space too."""
    tokenizer = TOKENIZERS["word-piece"]
    detokenizer, texts = _run(tokenizer, [1], [2, 3, 4, 5, 1])
    assert [" cat", " cats", " cats sat", " cats sat ,", " cats sat , the"] == texts
    detokenizer.finish()
    assert " cats sat , the" == detokenizer.text


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer that does something of its own with the text, as Whisper's does."""

    def _decode(self, *arguments: object, **options: object) -> str:
        return str(super()._decode(*arguments, **options)).upper()


def test_what_a_tokenizer_adds_to_decoding_is_kept() -> None:
    """Whether its class adds it, or somebody gave this one another way to decode."""
    plain = TOKENIZERS["byte-level"]
    ids = plain.encode("the cat", add_special_tokens=False)
    inner = plain.backend_tokenizer
    assert _run(Shouting(tokenizer_object=inner), [], ids)[0].text == "THE CAT"
    patched = PreTrainedTokenizerFast(tokenizer_object=inner)
    patched.decode = lambda token_ids, **options: "x" * len(token_ids)
    assert _run(patched, [], ids)[0].text == "x" * len(ids)


@given(ids=st.lists(st.integers(2, 289), max_size=120), data=st.data())
def test_random_tokens_lose_nothing(ids: list[int], data: st.DataObject) -> None:
    """Bytes that are no text become replacement characters, and never hold the rest up."""
    tokenizer = TOKENIZERS["byte-level"]
    split = data.draw(st.integers(0, len(ids)))
    detokenizer, texts = _run(tokenizer, ids[:split], ids[split:])
    detokenizer.finish()
    shown = _decode(tokenizer, ids[:split]).rstrip("\ufffd")
    assert _decode(tokenizer, ids) == shown + detokenizer.text
    for before, after in zip(["", *texts], texts, strict=False):
        assert after.startswith(before)


def test_what_waited_at_the_end_is_text_and_no_stop() -> None:
    """Or text would be missing from an output that ended by its length."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("at €", add_special_tokens=False)
    detokenizer, _ = _run(tokenizer, [], ids[:-1], stop="t \ufffd")
    assert "a" == detokenizer.text
    detokenizer.finish()
    assert detokenizer.stop is None
    assert tokenizer.decode(ids[:-1]) == detokenizer.text


def test_stop_texts_wait_for_min_tokens() -> None:
    """One that is complete before is no stop; one that completes after is."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = [tokenizer.encode(each, add_special_tokens=False)[0] for each in "ENDaEND"]
    detokenizer, texts = _run(tokenizer, [], ids, stop="END", min_tokens=5)
    assert "ENDa" == detokenizer.text
    assert 7 == len(texts)


def test_special_tokens_are_left_out_unless_wanted() -> None:
    """`skip_special_tokens`."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = [*tokenizer.encode("cat", add_special_tokens=False), 1]
    assert "cat" == _run(tokenizer, [], ids)[0].text
    assert "cat</s>" == _run(tokenizer, [], ids, skip_special_tokens=False)[0].text


# ---- what stop texts cost -----------------------------------------------------------------------


def naive(pieces: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    """What is to come of it, looked for from the beginning each time."""
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
    """A tokenizer whose tokens are the letters of an alphabet, some of them two at once."""

    TOKENS = ("", "a", "b", "c", "ab", "ba", "abc", "cab")

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(self.TOKENS[each] for each in token_ids)


@given(
    ids=st.lists(st.integers(1, 7), max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5),
)
def test_stop_texts_are_found_as_by_looking_for_each(ids: list[int], stops: list[str]) -> None:
    """Overlapping ones, ones within others, and what may begin any of them."""
    detokenizer, texts = _run(Letters(), [], ids, stop=stops)
    detokenizer.finish()
    expected = naive([Letters.TOKENS[each] for each in ids], stops)
    assert expected == (detokenizer.text, detokenizer.stop, texts)


def test_a_token_costs_the_same_whatever_the_stop_texts() -> None:
    """However many they are and however long, and however much of one of them was said."""

    def num_calls(stops: list[str]) -> int:
        detokenizer = Detokenizer(Letters(), [], SamplingParams(stop=stops))
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for at in range(2000):
                assert detokenizer.append(1 + at % 2) is None
        finally:
            sys.setprofile(None)
        return calls

    few = num_calls(["abc"])
    many = num_calls([f"{at:05}" for at in range(2000)] + ["ab" * 3000, "ba" * 3000 + "c"])
    assert many < 1.5 * few
