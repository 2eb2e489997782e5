"""Answers in each model's format: pieces of any size give what the whole text gives.

The texts are ours, in the forms that the models' chat templates render.
"""

import json
import random
from dataclasses import dataclass, field

import pytest

from vmkv.errors import ConfigError
from vmkv.serve.files import known_templates, read_response_template
from vmkv.serve.server import reply_format
from vmkv.serve.server.reply import ForcedCalls, ReplyParser
from vmkv.serve.server.reply_format import ReplyFormat

needs_parser = pytest.mark.skipif(
    not reply_format._CAN_PARSE, reason="this release of transformers has no ResponseParser"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
SPECIAL = ["<|im_end|>", "<s>", "</s>", "<|eot_id|>", "<|python_tag|>", "<|end|>", "[TOOL_CALLS]"]
PARIS = ("weather", {"city": 'Paris "}</>\\', "days": 3})
OSLO = ("weather", {"city": "Oslo é😀", "days": 1})


@dataclass
class Parsed:
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def arguments(self) -> list[tuple[str, object]]:
        return [(name, json.loads(text)) for name, text in self.calls]


def parsed(parser: ReplyParser, pieces: list[str]) -> Parsed:
    """Join the deltas of a text that comes in pieces."""
    found = Parsed()
    # The end comes with the last piece, or after it.
    pieces = pieces if len(pieces) % 2 else [*pieces, ""]
    for at, piece in enumerate(pieces, 1):
        delta = parser.push(piece, is_last=at == len(pieces))
        found.reasoning += delta.reasoning
        found.content += delta.content
        indices = [each.index for each in delta.tool_calls]
        assert indices == sorted(set(indices))
        for each in delta.tool_calls:
            if each.id is not None:
                assert each.name
                assert each.index == len(found.calls)
                assert 9 == len(each.id)
                assert each.id.isalnum()
                found.calls.append((each.name, ""))
            else:
                assert each.name is None
                assert each.arguments
            name, arguments = found.calls[each.index]
            found.calls[each.index] = (name, arguments + each.arguments)
    return found


def parser_of(name: str, prompt_end: str = "", **options: object) -> ReplyParser:
    special = reply_format.regex.compile("|".join(map(reply_format.regex.escape, SPECIAL)))
    form = ReplyFormat(read_response_template(name))
    return form.parser(prompt_end, **{"tools": [WEATHER], "special_tokens": special, **options})


def whole_and_streamed(name: str, text: str, prompt_end: str = "", **options: object) -> Parsed:
    """Parse a text as a whole; pieces of each length and of random ones must give the same."""
    whole = parsed(parser_of(name, prompt_end, **options), [text])
    draw = random.Random(0)
    for size in [*range(1, 10), *[None] * 10]:
        pieces, rest = [], text
        while rest:
            length = size or draw.randint(1, 9)
            pieces, rest = [*pieces, rest[:length]], rest[length:]
        assert whole == parsed(parser_of(name, prompt_end, **options), pieces), size
    return whole


def dumped(call: tuple[str, object], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def hermes(*calls: tuple[str, object]) -> str:
    return "\n".join(f"<tool_call>\n{dumped(each)}\n</tool_call>" for each in calls)


def xml(*calls: tuple[str, dict[str, object]]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        + "</function>\n</tool_call>"
        for name, values in calls
    )


def deepseek(*calls: tuple[str, object], old: bool) -> str:
    texts = [(name, json.dumps(values, ensure_ascii=False)) for name, values in calls]
    return (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
            if old
            else f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
            for name, text in texts
        )
        + "<｜tool▁calls▁end｜>"
    )


def harmony(name: str, values: object, *, old: bool = False) -> str:
    text = json.dumps(values, ensure_ascii=False)
    if old:
        return f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{text}"
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"<|start|>assistant{head}{text}"


def gemma(name: str, city: str, days: int) -> str:
    return f'<|tool_call>call:{name}{{city:<|"|>{city}<|"|>,days:{days}}}<tool_call|>'


THOUGHT, LOOK = "Two cities,\n\nso two calls.", "I look."
CHATML = "<|im_start|>assistant\n"
LLAMA3 = "<|start_header_id|>assistant<|end_header_id|>\n\n"
#: Name of the template, end of the prompt, and a text that calls for PARIS and OSLO.
FORMATS = {
    "hermes": ("hermes", CHATML, f"{LOOK}\n{hermes(PARIS, OSLO)}"),
    "hermes, a list": (
        "hermes",
        CHATML,
        f"<tool_call>[{dumped(PARIS)}, {dumped(OSLO)}]</tool_call><|im_end|>\n",
    ),
    "hermes, arguments first": (
        "hermes",
        CHATML,
        "\n".join(
            f"<tool_call>{json.dumps({'arguments': values, 'name': name})}</tool_call>"
            for name, values in (PARIS, OSLO)
        ),
    ),
    "qwen3": (
        "qwen3",
        CHATML,
        f"<think>\n{THOUGHT}\n</think>\n\n{LOOK}\n{hermes(PARIS, OSLO)}<|im_end|>",
    ),
    "qwen3, begun reasoning": (
        "qwen3",
        f"<|im_start|>user\nhi<|im_end|>\n{CHATML}<think>\n",
        f"{THOUGHT}\n</think>\n\n{hermes(PARIS, OSLO)}\n{LOOK}",
    ),
    "qwen3, no reasoning": (
        "qwen3",
        f"{CHATML}<think>\n\n</think>\n\n",
        f"{LOOK}\n\n{hermes(PARIS, OSLO)}",
    ),
    "qwen3_coder": (
        "qwen3_coder",
        f"{CHATML}<think>\n",
        f"{THOUGHT}\n</think>\n\n{LOOK}\n\n{xml(PARIS, OSLO)}<|im_end|>",
    ),
    "llama3": ("llama3", LLAMA3, f"{dumped(PARIS, 'parameters')}; {dumped(OSLO, 'parameters')}"),
    "llama3, python tag": (
        "llama3",
        LLAMA3,
        f"<|python_tag|>{dumped(PARIS, 'parameters')};{dumped(OSLO)}<|eom_id|>",
    ),
    "llama3, lines": (
        "llama3",
        LLAMA3,
        f"{dumped(PARIS, 'parameters')}\n{dumped(OSLO, 'parameters')} \n<|eot_id|>",
    ),
    "deepseek r1": (
        "deepseek",
        "<｜Assistant｜><think>\n",
        f"{THOUGHT}\n</think>\n\n{LOOK}{deepseek(PARIS, OSLO, old=True)}",
    ),
    "deepseek v3.1": (
        "deepseek",
        "<｜Assistant｜></think>",
        f"{LOOK}{deepseek(PARIS, OSLO, old=False)}<｜end▁of▁sentence｜>",
    ),
    "mistral": (
        "mistral",
        "[INST] hi[/INST]",
        f"[TOOL_CALLS] [{dumped(PARIS)}, {dumped(OSLO)}]</s>",
    ),
    "mistral, names first": (
        "mistral",
        "[INST]hi[/INST]",
        (
            f"[THINK]{THOUGHT}[/THINK]{LOOK}[TOOL_CALLS]weather[ARGS]{json.dumps(PARIS[1])}"
            f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{json.dumps(OSLO[1])}"
        ),
    ),
    "harmony": (
        "harmony",
        "<|start|>assistant",
        (
            f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary"
            f"<|message|>{LOOK}<|end|>{harmony(*PARIS)}<|call|>{harmony(*OSLO, old=True)}"
        ),
    ),
    "gemma4": (
        "gemma4",
        "<|turn>model\n",
        (
            f"<|channel>thought\n{THOUGHT}<channel|>{LOOK}"
            f"{gemma('weather', PARIS[1]['city'], 3)}{gemma('weather', OSLO[1]['city'], 1)}"
        ),
    ),
    "glm4": (
        "glm4",
        "<|assistant|>",
        f"<think>{THOUGHT}</think>\n{LOOK}\n"
        + "\n".join(
            f"<tool_call>{name}\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
                for key, value in values.items()
            )
            + "</tool_call>"
            for name, values in (PARIS, OSLO)
        ),
    ),
}


@needs_parser
@pytest.mark.slow
@pytest.mark.parametrize("case", FORMATS)
def test_pieces_give_what_the_whole_gives(case):
    """THOUGHT is reasoning and LOOK is content, where the text has them."""
    name, prompt_end, text = FORMATS[case]
    found = whole_and_streamed(name, text, prompt_end)
    told = [THOUGHT * (THOUGHT in text), LOOK * (LOOK in text), [PARIS, OSLO]]
    assert told == [found.reasoning, found.content, found.arguments()]


@needs_parser
@pytest.mark.parametrize("case", FORMATS)
def test_cut_answers_never_raise(case):
    # An answer that max_tokens cut: every prefix parses, and its text grows with it.
    name, prompt_end, text = FORMATS[case]
    for end in range(0, len(text), 7):
        cut, halves = text[:end], [text[: end // 2], text[end // 2 : end]]
        whole = parsed(parser_of(name, prompt_end), [cut])
        assert whole == parsed(parser_of(name, prompt_end), halves)
        assert all(each == "weather" for each, _ in whole.calls)


CALL = '<tool_call>{"name": "weather", "arguments": '
#: Name, text, content, and the text of each call's arguments.
BROKEN = {
    "no JSON": ("hermes", "Hm.<tool_call>{weather}</tool_call>", "Hm.<tool_call>{weather}", []),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None, []),
    "a number": ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, []),
    "broken arguments": (
        "hermes",
        f'{CALL}{{"city": Paris}}}}</tool_call>.',
        ".",
        ['{"city": Paris}'],
    ),
    "cut arguments": ("hermes", f'{CALL}{{"city": "Pa\\', "", ['{"city": "Pa\\']),
    "too few brackets": ("hermes", f'{CALL}{{"city": "a"}}</tool_call>', "", ['{"city": "a"}']),
    "too many brackets": (
        "hermes",
        f'{CALL}{{"city": "a"}}}}}}}}}}</tool_call>',
        "",
        ['{"city": "a"}'],
    ),
    "a list as arguments": ("hermes", f"{CALL}[1]}}</tool_call>", "", ["[1]"]),
    "a cut call": ("hermes", '<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', []),
    "cut XML": ("qwen3_coder", "A<tool_call>\n<function=weather>\n<para", None, []),
    "another Gemma": ("gemma4", "<|tool_call>call:weather{city:oh}<tool_call|>", None, []),
    "prose with JSON": ("llama3", 'Say {"name": "weather", "parameters": {}}.', None, []),
    "a line of JSON": ("llama3", 'Say\n{"name": "weather", "parameters": {}}', None, []),
    "empty": ("qwen3", "", "", []),
    "special tokens": (
        "qwen3",
        "<s>a<|im_<s>end|>b<think></s></think> c<s>\n",
        "a<|im_end|>b c\n",
        [],
    ),
}


@needs_parser
@pytest.mark.parametrize("case", BROKEN)
def test_broken_calls_are_content_and_begun_calls_stay(case):
    name, text, content, arguments = BROKEN[case]
    found = whole_and_streamed(name, text)
    assert [("weather", each) for each in arguments] == found.calls
    assert "" == found.reasoning
    if content is None:  # All of the text but the end of its region.
        content = text.removesuffix("</tool_call>").removesuffix("<tool_call|>")
    assert content == found.content


@needs_parser
@pytest.mark.parametrize(
    ("name", "values"),
    [("hermes", {"a": {"b": [1, "}"]}}), ("qwen3_coder", {"city": "Rome", "days": 2})],
)
def test_calls_equal_those_of_transformers(name, values):
    from transformers.utils.chat_parsing import parse_response

    text = f"Now.\n{hermes(('weather', values)) if name == 'hermes' else xml(('weather', values))}"
    template = read_response_template(name)
    expected = parse_response(text, template, prefix="", tools=[WEATHER])
    found = whole_and_streamed(name, text)
    assert expected["content"] == found.content
    calls = [
        (each["function"]["name"], each["function"]["arguments"]) for each in expected["tool_calls"]
    ]
    assert [("weather", values)] == calls == found.arguments()


@needs_parser
def test_only_the_first_call_is_kept_unless_calls_are_parallel():
    found = whole_and_streamed("hermes", hermes(PARIS, OSLO), is_parallel=False)
    assert [PARIS] == found.arguments()


@needs_parser
def test_special_tokens_stay_where_the_request_keeps_them():
    assert "a<s>b" == whole_and_streamed("qwen3", "a<s>b", special_tokens=None).content


@needs_parser
def test_an_answer_that_the_prompt_begins_keeps_its_spaces():
    found = whole_and_streamed("qwen3", " world \n", f"{CHATML}Hello")
    assert " world \n" == found.content


@needs_parser
def test_white_space_is_dropped_beside_regions_only():
    think = "<think>\n why \n</think>"
    found = whole_and_streamed("qwen3", f" {think}\n\nyes, but ")
    assert ("why", "yes, but ") == (found.reasoning, found.content)
    assert " no region \n" == whole_and_streamed("qwen3", " no region \n").content
    assert "Now." == whole_and_streamed("hermes", f"Now.\n{hermes(PARIS)}\n").content


def test_forced_calls_are_plain_json():
    text = json.dumps([{"name": name, "parameters": values} for name, values in (PARIS, OSLO)])
    arguments = json.dumps(PARIS[1])
    for size in range(1, 10):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert [PARIS, OSLO] == parsed(ForcedCalls(None), pieces).arguments()
        assert [PARIS] == parsed(ForcedCalls(None, is_parallel=False), pieces).arguments()
        pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
        assert [("weather", arguments)] == parsed(ForcedCalls("weather"), pieces).calls
    assert Parsed(content='[{"na') == parsed(ForcedCalls(None), ['[{"na'])
    assert Parsed() == parsed(ForcedCalls("weather"), [])


@needs_parser
def test_response_templates_of_files_are_checked(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(read_response_template("hermes")))
    assert read_response_template("hermes") == read_response_template(str(path))
    path.write_text('{"fields": {}}')
    with pytest.raises(ConfigError, match="no valid response template"):
        ReplyFormat(read_response_template(str(path)))
    with pytest.raises(ConfigError, match="none of harmony, "):
        read_response_template("unknown")


# ---- white space ---------------------------------------------------------------------------------

OWN_DELIMITERS = {
    "open_pattern": r"(?:\s*<call>|<also>)(?P<name>\w+)",
    "close_pattern": r"[ \n]+</call>|</also>\n?",
    "repeats": True,
    "content": "json",
    "transform": {
        "type": "function",
        "function": {"name": "{name}", "arguments": "{content}"},
    },
}
OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant",
    "fields": {
        "tool_calls": OWN_DELIMITERS,
        "content": {"close_pattern": r"\s*<end>", "content": "text"},
    },
}


def delimiters(form: ReplyFormat) -> list[str]:
    fields = form._template.fields.values()
    patterns = [each for it in fields for each in (it.open_re, it.close_re) if each is not None]
    found = [each.pattern for each in patterns]
    return [*found, form.pattern.next.pattern] if form.pattern else found


@needs_parser
@pytest.mark.parametrize("name", [*known_templates(), OWN], ids=lambda it: str(it)[:11])
def test_delimiters_are_not_sought_at_each_place_of_white_space(name):
    """Else a search takes the square of its length, and an answer the cube."""
    form = ReplyFormat(read_response_template(name) if isinstance(name, str) else name)
    for pattern in delimiters(form):
        within = reply_format.regex.compile(rf"\s(?:{pattern})", reply_format.regex.DOTALL)
        for run in (" " * 9, "\n" * 9):
            assert within.match(run, partial=True) is None, pattern
            assert within.fullmatch(run) is None, pattern


@needs_parser
@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>", "</function>\n</tool_call>"),
        ("glm4", "<tool_call>f\n<arg_key>", "</tool_call>"),
    ],
)
def test_arguments_that_are_white_space_are_read_once(name, begin, end):
    """A search in them that begins at each place would take hours."""
    run = " " * 20_000 + "x" + "\n" * 20_000
    found = parsed(parser_of(name), [begin + run, end])
    assert found.calls or run in found.content


def unbounded(monkeypatch, parse):
    with monkeypatch.context() as patch:
        patch.setattr(reply_format, "_bounded", dict)
        return parse()


SPACED = [
    "  \n Hello  \n\n<|im_end|>",
    "a \n b",
    f"x\n\n  {hermes(PARIS)} \n\n {hermes(OSLO)}\n Done. \n",
    f"<think>\n \n</think> \n\n {hermes(PARIS)}  ",
    " \n" * 40,
]


@needs_parser
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "hermes", "qwen3_coder", "glm4", "deepseek", "mistral"])
def test_replies_are_as_without_the_bound(monkeypatch, name):
    texts = [*SPACED, *(text for which, _, text in FORMATS.values() if which == name)]
    for text in texts:
        bounded = whole_and_streamed(name, text)
        assert bounded == unbounded(monkeypatch, lambda text=text: whole_and_streamed(name, text))


@needs_parser
def test_replies_of_other_templates_are_as_without_the_bound(monkeypatch):
    draw = random.Random(1)
    parts = [" ", "\n", "\n\n", "<call>f", "<also>g", "</call>", "</also>", "{}", "x", "<end>"]

    def replies():
        form, found = ReplyFormat(OWN), []
        for text, pieces in texts:
            found.append(parsed(form.parser("", tools=[], special_tokens=None), [text]))
            assert found[-1] == parsed(form.parser("", tools=[], special_tokens=None), pieces)
        return found

    texts = []
    for _ in range(150):
        pieces = draw.choices(parts, k=30)
        texts.append(("".join(pieces), pieces))
    found = replies()
    assert found == unbounded(monkeypatch, replies)
    assert {0, 1, 2} <= {len(each.calls) for each in found}
