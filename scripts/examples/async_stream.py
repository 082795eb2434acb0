"""Two answers streamed at once in an asyncio program, and a third aborted."""

import asyncio

from jaxserve import AsyncLLM, EngineConfig, SamplingParams


async def stream(llm: AsyncLLM, prompt: str) -> None:
    """Print an answer's pieces as they come: each output holds only the new text."""
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12)):
        print(f"{prompt}: +{output.outputs[0].text!r}", flush=True)


async def main() -> None:
    """Serve two streams to their ends, and leave the third early."""
    async with AsyncLLM(EngineConfig()) as llm:
        await asyncio.gather(stream(llm, "The quick brown fox"), stream(llm, "Once upon a time"))
        endless = SamplingParams(max_tokens=500, ignore_eos=True)
        async for output in llm.generate("Say the words", endless):
            print(f"left after {len(output.outputs[0].token_ids)} tokens")
            break  # ends the request: its slot and pages are free again


if __name__ == "__main__":
    asyncio.run(main())
