"""Agents from npm do a task of two steps: they call the shell, and answer with its result.

The model is scripted by its weights, so that it does what a large one would; all else is real.
Agents find a proxy that takes no connections, so that they reach this machine only.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.agent_cases import ANSWER, FILE, TASK

pytestmark = pytest.mark.clients
NOBODY = "http://127.0.0.1:9"
_CODEX = """
model = "smol"
model_provider = "here"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
"""
#: Two loops of tool calls, the second one streamed.
_AI_SDK = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { execSync } from "node:child_process";
import { z } from "zod";

const [url, prompt] = process.argv.slice(1);
const model = createOpenAICompatible({ name: "here", baseURL: `${url}/v1` })("smol");
const execute = async ({ command }) => execSync(command, { encoding: "utf8" });
const inputSchema = z.object({ command: z.string().describe("what the shell runs") });
const tools = { Bash: tool({ description: "Run a command.", inputSchema, execute }) };
const options = { model, tools, prompt, stopWhen: stepCountIs(4), maxRetries: 0 };
const whole = await generateText(options);
const streamed = streamText(options);
for await (const part of streamed.fullStream) if (part.type === "error") throw part.error;
const told = [whole, streamed].map(async (each) => [await each.text, (await each.steps).length]);
console.log(JSON.stringify(await Promise.all(told)));
"""


@pytest.fixture(scope="module")
def agents() -> Path:
    """The folder of npm's packages."""
    found = os.environ.get("VMKV_AGENTS")
    if not found:
        pytest.skip("run by `make clients-npm`, which installs the agents")
    return Path(found) / "node_modules"


@pytest.fixture(scope="module")
def agent_url(
    agents: Path, python: str, serve: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A server of a scripted model."""
    folder = str(tmp_path_factory.mktemp("agent-model"))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([python, "-m", "helpers.agent_model", folder], env=environment, check=True)
    with serve(folder) as address:
        yield address


def run(folder: Path, *command: str | Path, **environment: str) -> str:
    """Run an agent in an empty folder and home; return what it prints."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    own = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1"}
    own |= {"HTTP_PROXY": NOBODY, "HTTPS_PROXY": NOBODY, **environment}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(command, cwd=work, env=own, **streams, text=True, timeout=600)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert 3 == len((work / FILE).read_text().split())
    return done.stdout


def test_codex_over_responses(agents: Path, agent_url: str, tmp_path: Path) -> None:
    config = tmp_path / "codex"
    config.mkdir()
    (config / "config.toml").write_text(_CODEX.format(url=agent_url))
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    told = run(tmp_path, agents / ".bin" / "codex", "exec", *options, TASK, CODEX_HOME=str(config))
    assert ANSWER == told.strip()


def test_claude_code_over_messages(agents: Path, agent_url: str, tmp_path: Path) -> None:
    """The second request finds the first one's prompt in the cache."""
    # The package's launcher for where no script of a package is run at its installation.
    program = agents / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
    options = ("--allowedTools", "Bash", "--output-format", "json")
    told = run(
        tmp_path,
        *("node", program, "-p", TASK, *options),
        ANTHROPIC_BASE_URL=agent_url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="smol",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )
    result = json.loads(told)
    assert (ANSWER, 2, False) == (result["result"], result["num_turns"], result["is_error"])
    usage = result["usage"]
    assert usage["cache_read_input_tokens"] > 0.9 * usage["input_tokens"]


def test_ai_sdk_over_chats(agents: Path, agent_url: str, tmp_path: Path) -> None:
    """Vercel's AI SDK, whole and streamed."""
    (tmp_path / "node_modules").symlink_to(agents)
    told = run(tmp_path, "node", "--input-type=module", "-e", _AI_SDK, agent_url, TASK)
    assert [[ANSWER, 2]] * 2 == json.loads(told)
