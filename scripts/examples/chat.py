"""Conversation whose second turn finds the first one's pages in the prefix cache."""

from jaxserve import LLM, SamplingParams

CODES = "The code of Tom is 381. The code of Eva is 264. The code of Max is 792."


def main() -> None:
    """Ask two questions about one text, the second after the first's answer."""
    sampling = SamplingParams(temperature=0, max_tokens=16)
    messages = []
    with LLM() as llm:
        for question in (f"{CODES} What is the code of Eva?", f"{CODES} What is the code of Max?"):
            messages.append({"role": "user", "content": question})
            [output] = llm.chat(messages, sampling, use_tqdm=False)
            answer = output.outputs[0].text
            messages.append({"role": "assistant", "content": answer})
            print(f"{question}\n  {answer}  ({output.num_cached_tokens} prompt tokens were cached)")


if __name__ == "__main__":
    main()
