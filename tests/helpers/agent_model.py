"""A scripted model for coding agents: it calls the shell, and answers once it has the result.

    PYTHONPATH=tests python -m helpers.agent_model FOLDER

The template takes a system message at the beginning only, as those of many models.
"""

from __future__ import annotations

import json
import sys

from .agent_cases import ANSWER, COMMAND, RESULT
from .scripted import script, scripted

#: Tools for the shell, and the argument that is the command.
_SHELLS = {"exec_command": "cmd", "Bash": "command"}
_TEMPLATE = (
    "{% if tools %}<tool_call> <think> {{ tools | tojson }}{% endif %}"
    "{% set state = namespace(script='SCRIPT-failed') %}"
    "{% for tool in tools or () %}{% if tool.function.name in SHELLS %}"
    "{% set state.script = '<script-' + tool.function.name + '>' %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if message.role == 'tool' %}{% set state.script = "
    "'SCRIPT-done' if 'RESULT' in message.content else 'SCRIPT-failed' %}{% endif %}"
    "<|im_start|>{{ message.role + '\n' + message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ state.script }}{% endif %}"
)


def main() -> None:
    """Save the model."""
    scripts = {"done": ANSWER, "failed": "I have seen no result."}
    for name, argument in _SHELLS.items():
        call = {"name": name, "arguments": {argument: COMMAND}}
        text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        scripts[name] = f"<think>I need a shell.</think>\n\n{text}"
    template = _TEMPLATE.replace("SHELLS", repr([*_SHELLS])).replace("RESULT", RESULT)
    for name in scripts:
        template = template.replace(f"'SCRIPT-{name}'", repr(script(name)))
    model, tokenizer = scripted(scripts, template, max_tokens=1 << 18)
    model.save_pretrained(sys.argv[1])
    tokenizer.save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
