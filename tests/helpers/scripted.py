"""A model that answers with texts of the test's choice, by its weights.

A prompt ends with a special token that names a script. The model's next token depends on its last
token alone: embeddings are one-hot, the layer adds nothing, and the head maps each token to its
successor. So a script is cut into pieces that occur once in all scripts, each a token of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from tokenizers import AddedToken

from .serving import MAX_TOKENS, tiny_tokenizer
from .tiny_models import llama_config

#: Messages in ChatML; the answer begins with the first message, which is a script's token.
CHAT_TEMPLATE = (
    "{% if tools %}<tool_call> <think> {{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|im_start|>{{ message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or () %}"
    "({{ call.function.name }} {{ call.function.arguments | items | list }})"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ messages[0].content }}{% endif %}"
)


def script(name: str) -> str:
    """The token that a prompt ends with to start a script."""
    return f"<script-{name}>"


def scripted(
    scripts: Mapping[str, str], chat_template: str = CHAT_TEMPLATE, max_tokens: int = MAX_TOKENS
) -> tuple[Any, Any]:
    """Return a model and a tokenizer; texts must be ASCII. After a script the answer ends."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer.from_str(
            tiny_tokenizer().backend_tokenizer.to_str()
        ),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=chat_template,
    )
    known = set(tokenizer.get_vocab())
    chains = {name: _pieces(text, known) for name, text in scripts.items()}
    pieces = [each for chain in chains.values() for each in chain]
    # Special tokens are found first, so that no piece takes the beginning of one.
    tokenizer.add_tokens([AddedToken(each, normalized=True) for each in pieces])
    names = ["<|im_start|>", "<|im_end|>", *map(script, chains)]
    tokenizer.add_tokens([AddedToken(each, special=True) for each in names], special_tokens=True)
    ids = tokenizer.get_vocab()
    size = len(tokenizer) + -len(tokenizer) % 8
    successors = torch.full((size,), tokenizer.eos_token_id)
    for name, chain in chains.items():
        tokens = [ids[script(name)], *(ids[each] for each in chain)]
        successors[tokens[:-1]] = torch.tensor(tokens[1:])
    return _model(successors, max_tokens), tokenizer


def _pieces(text: str, known: set[str]) -> list[str]:
    """Cut a text into pieces that are not known; they are known afterwards."""
    assert text.isascii()
    pieces: list[str] = []
    begin = 0
    for end in range(1, len(text) + 1):
        if text[begin:end] not in known:
            known.add(text[begin:end])
            pieces.append(text[begin:end])
            begin = end
    while begin < len(text):  # The end is known: it joins the piece before it.
        pieces[-1:] = [pieces[-1] + text[begin:]]
        begin = len(text)
        assert pieces[-1] not in known
        known.add(pieces[-1])
    return pieces


def _model(successors: torch.Tensor, max_tokens: int) -> Any:
    size = len(successors)
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    sizes = {"vocab_size": size, "hidden_size": size, "intermediate_size": 8}
    config = llama_config(
        **sizes,
        **heads,
        num_hidden_layers=1,
        max_position_embeddings=max_tokens,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight[successors, torch.arange(size)] = 1.0
    model.generation_config.eos_token_id = 1
    return model
