"""Comparison of greedy tokens with those of Hugging Face Transformers (`pip install torch`)."""

import torch
from transformers import AutoModelForCausalLM

from jaxserve import LLM, SamplingParams
from jaxserve.settings.config import bundled_model

PROMPTS = ["Once upon a time", "The quick brown fox", "Say the words: red fox"]


def main() -> None:
    """Print whether both draw the same tokens, in float32."""
    folder = bundled_model()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(folder) as llm:
        outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24,
            min_new_tokens=24, pad_token_id=0,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        same = output.outputs[0].token_ids == expected
        print(f"{output.prompt!r}: {'equal' if same else 'different'}")


if __name__ == "__main__":
    main()
