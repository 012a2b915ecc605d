"""vLLM's CPU backend as a subject of `benchmarks.engine`: a child process in vLLM's own virtual
environment, told by lines of JSON what to generate.

    PEER_PYTHON peer_vllm.py MODEL_DIR        one request per line on stdin, one answer on stdout

Runs without anything of ours: it is executed by the peer's interpreter.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints must not mix with the answers
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    model = LLM(
        sys.argv[1],
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=32,
        enable_prefix_caching=False,
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        settings = SamplingParams(temperature=0, max_tokens=ask["out"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in ask["prompts"]]
        began = time.perf_counter()
        done = model.generate(prompts, settings, use_tqdm=False)
        answer = {
            "wall": time.perf_counter() - began,
            "tokens": sum(len(each.outputs[0].token_ids) for each in done),
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
