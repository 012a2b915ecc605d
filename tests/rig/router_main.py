"""A router process that starts long requests, says so, and waits to be killed.

Reads one line of JSON: {"spec": …, "workers": […], "requests": n}.  Ends with its input.
"""

import asyncio
import json
import sys
from types import SimpleNamespace

from core.sampling import Sampling
from core.spec import ClusterSpec, from_mapping
from tests.rig.cluster import Router
from tests.rig.workers import worker_info


async def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    infos = [worker_info(w) for w in wanted["workers"]]
    workers = {i.worker_id: SimpleNamespace(info=i, epoch=i.epoch, alive=True) for i in infos}
    spec = from_mapping(ClusterSpec, wanted["spec"])
    async with Router(SimpleNamespace(spec=spec, workers=workers), "doomed") as router:
        sampling = Sampling(max_tokens=2000, ignore_eos=True)
        running = [
            await router.dispatcher.generate(router.request([i] * 100, sampling))
            for i in range(wanted["requests"])
        ]
        await asyncio.gather(*(anext(aiter(generation)) for generation in running[:4]))
        print("running", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
