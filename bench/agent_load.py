"""Sessions of agents on an OpenAI server, from processes of its own.

    python bench/agent_load.py URL MODEL < load.json > turns.json

All sessions begin with the same tokens. A session asks, reads the answer as it comes, lets a tool
run, and asks again with all that was said and the tool's result. Prompts are token ids; a load's
come from its name alone, so every server gets the same, and no load gets another's.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from live_load import NUM_PROCESSES, Arrival, Load, Timing, ask, body_of, new_client


@dataclass(frozen=True)
class Agents:
    """Sessions of several turns.

    Attributes:
        name: Its name, and the seed of all that is random in it.
        num_sessions, num_turns: How many there are, and how many turns each has.
        vocabulary: Tokens are drawn below this.
        shared_tokens: Tokens that all sessions begin with.
        start_tokens: A session's own tokens of its first turn, on average; 0.6 to 1.4 times that.
        tool_tokens: Tokens of a tool's result, on average; 0.3 to 1.7 times that.
        new_tokens: Tokens of each answer.
        think_s: Between two turns, on average, distributed exponentially.
        limit_s: Turns begin within this time.
        first_turn: Turns before this one were asked before, of another server.
    """

    name: str
    num_sessions: int
    num_turns: int = 6
    vocabulary: int = 120_000
    shared_tokens: int = 2000
    start_tokens: int = 7000
    tool_tokens: int = 1500
    new_tokens: int = 150
    think_s: float = 4.0
    limit_s: float = 300.0
    first_turn: int = 0


@dataclass
class Turn:
    """What became of a turn: its number in the session, its prompt's tokens, and its timing."""

    number: int
    num_prompt_tokens: int
    timing: Timing


def turns_of(agents: Agents, number: int) -> Iterator[tuple[float, list[int]]]:
    """Yield the seconds before each turn of a session, and its prompt."""
    source = random.Random(f"{agents.name}, {number}")
    tokens = range(5, agents.vocabulary)

    def drawn(mean_tokens: int, spread: float) -> list[int]:
        count = int(mean_tokens * source.uniform(1 - spread, 1 + spread))
        return source.choices(tokens, k=count)

    prompt = random.Random(agents.name).choices(tokens, k=agents.shared_tokens)
    prompt += drawn(agents.start_tokens, 0.4)
    wait_s = source.random() * 2 * agents.think_s
    for _ in range(agents.num_turns):
        yield wait_s, prompt
        prompt = prompt + drawn(agents.new_tokens, 0) + drawn(agents.tool_tokens, 0.7)
        wait_s = source.expovariate(1 / agents.think_s)


def least_s(agents: Agents, turn_s: float) -> float:
    """Return how long a load takes if every turn from the first one on takes `turn_s`."""
    longest_s = 0.0
    for number in range(agents.num_sessions):
        waits_s = [wait_s for wait_s, _ in turns_of(agents, number)][agents.first_turn :]
        longest_s = max(longest_s, sum(waits_s) + turn_s * len(waits_s))
    return longest_s


async def run_session(
    client: Any, model: str, agents: Agents, number: int, start_s: float
) -> list[Turn]:
    """Run the turns of a session one after the other, up to the first one that fails."""
    load = Load(agents.name, 0, 1, agents.vocabulary)
    turns: list[Turn] = []
    for at, (wait_s, prompt) in enumerate(turns_of(agents, number)):
        if at >= agents.first_turn:
            await asyncio.sleep(wait_s)
            due_s = time.perf_counter() - start_s
            if due_s > agents.limit_s:
                break
            body = body_of(load, Arrival(due_s, prompt, agents.new_tokens), model)
            timing = await ask(client, body, due_s, start_s)
            turns.append(Turn(at, len(prompt), timing))
            if timing.error:
                break
    return turns


async def run_all(
    url: str, model: str, agents: Agents, numbers: Sequence[int], start_s: float
) -> list[Turn]:
    """Run these sessions at the same time."""
    async with new_client(url) as client:
        await client.get("/health")  # The first request imports modules.
        await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
        sessions = [run_session(client, model, agents, number, start_s) for number in numbers]
        return [turn for turns in await asyncio.gather(*sessions) for turn in turns]


def run_part(
    url: str, model: str, agents: Agents, numbers: Sequence[int], start_s: float
) -> list[Turn]:
    gc.freeze()  # A garbage collection would count against the server.
    return asyncio.run(run_all(url, model, agents, numbers, start_s))


def apply(agents: Agents, url: str, model: str) -> list[Turn]:
    """Run all sessions on a server; return their turns."""
    context = multiprocessing.get_context("fork")  # Nothing here has threads yet.
    count = min(NUM_PROCESSES, agents.num_sessions)
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        start_s = time.perf_counter() + 1.5
        numbers = range(agents.num_sessions)
        parts = [
            pool.submit(run_part, url, model, agents, numbers[at::count], start_s)
            for at in range(count)
        ]
        return [turn for part in parts for turn in part.result()]


def main(argv: Sequence[str] | None = None) -> int:
    """Read a load, apply it, write its turns."""
    url, model = argv or sys.argv[1:]
    turns = apply(replace(Agents("", 1), **json.load(sys.stdin)), url, model)
    json.dump([asdict(each) for each in turns], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
