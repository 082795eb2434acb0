"""BeamSearchParams: settings of a beam search."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

from jaxserve.errors import InvalidRequest
from jaxserve.request import MAX_CHOICES, MAX_LOGPROB_TOKEN_IDS, SamplingParams
from jaxserve.settings.checks import exact_int, within


@dataclass(frozen=True)
class BeamSearchParams:
    """Settings of a beam search, with vLLM's names.

    Args:
        beam_width: sequences that are kept, and returned, 1 to 128. Twice as many candidates of
            each are compared, so that the engine's `max_logprobs` bounds it.
        max_tokens: tokens that are generated; a search goes on to the last one.
        ignore_eos: go on past the model's end-of-sequence tokens.
        temperature: of log-probabilities where the engine's `logprobs_mode` is a processed one.
        length_penalty: exponent of the number of generated tokens by which a sum of
            log-probabilities is divided, -16 to 16.
        include_stop_str_in_output: whether the token that ended a sequence is one of its tokens.
        skip_special_tokens: whether special tokens are left out of the text.
        allowed_token_ids: the only candidates, up to 128; None for all.

    Raises:
        InvalidRequest: on construction, naming the first bad field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: Listing[int] | None = None

    def __post_init__(self) -> None:
        exact_int(self.beam_width, "beam_width", 1, MAX_CHOICES)
        exact_int(self.max_tokens, "max_tokens", 1, 2**31 - 1)
        within(self.length_penalty, "length_penalty", -16.0, 16.0)
        checked = SamplingParams(
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            allowed_token_ids=self.allowed_token_ids,
        )
        name = "allowed_token_ids"
        if len(checked.allowed_token_ids or ()) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(
                f"{name} takes at most {MAX_LOGPROB_TOKEN_IDS} token ids in a beam search", name
            )
        object.__setattr__(self, name, checked.allowed_token_ids)
