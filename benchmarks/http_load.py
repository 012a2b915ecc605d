"""Concurrent streams over `/v1/completions`, timed at the client."""

import asyncio
import json
import time
from collections.abc import Sequence

import aiohttp

from benchmarks.measure import Run, Timing

LIMIT_S = 300.0


async def run(url: str, model: str, prompts: Sequence[list[int]], streams: int, out: int) -> Run:
    """All prompts, `streams` at a time.  Raises RuntimeError when a stream ends early."""
    turn = asyncio.Semaphore(streams)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def one(prompt: list[int]) -> Timing:
            async with turn:
                return await _stream(session, model, prompt, out)

        began = time.perf_counter()
        timings = await asyncio.gather(*map(one, prompts))
        return Run(tuple(timings), time.perf_counter() - began)


async def _stream(
    session: aiohttp.ClientSession, model: str, prompt: list[int], out: int
) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": out,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    sent = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async with session.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                count = sum(len(c.get("token_ids") or ()) for c in chunk["choices"])
                last = time.perf_counter() - sent if count else last
                first = first or last
                tokens += count
    if tokens != out:
        raise RuntimeError(f"a stream ended after {tokens} of {out} tokens")
    return Timing(first, last, tokens)
