"""Two models in one process, which share its memory: the bundled one, whole and in 8 bits."""

from jaxserve import LLM, SamplingParams


def main() -> None:
    """Print both models' answers to one question, and how sure each is of its first token."""
    question = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
    sampling = SamplingParams(temperature=0, max_tokens=16, logprobs=0)
    # Each takes half of the KV cache memory that one alone would take.
    whole = LLM(memory_share=0.5)
    narrow = LLM(memory_share=0.5, quantization="int8")
    with whole, narrow:
        for name, llm in (("float32", whole), ("int8", narrow)):
            [output] = llm.chat(question, sampling, use_tqdm=False)
            answer = output.outputs[0]
            [first, *_] = answer.logprobs or []
            print(f"{name}: {answer.text} ({first[answer.token_ids[0]].logprob:.5f})")


if __name__ == "__main__":
    main()
