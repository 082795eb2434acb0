"""What config.json says of multi-head latent attention."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.models.config.fields import Fields

MAX_RANK = 1 << 16
MAX_SIZE = 1 << 12


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention.

    Attributes:
        query_rank: of the latent queries; None where queries are projected at once.
        rank: of the latent keys and values.
        plain, rotary: parts of a query or key head that are not and that are rotated.
        value: size of a value head.
        interleaved: neighbours are rotated as pairs in the checkpoint's order.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotary: int
    value: int
    interleaved: bool

    @property
    def key(self) -> int:
        """Size of a query or key head."""
        return self.plain + self.rotary

    @property
    def cached(self) -> int:
        """Size of a head in the cache, where keys and values share one."""
        return max(self.key, self.value)


ReadLatent = Callable[[Fields], Latent | None]


def no_latent(fields: Fields) -> Latent | None:
    """Ordinary attention."""
    return None


def deepseek_v2_latent(fields: Fields) -> Latent:
    """Pairs are neighbours."""
    return _latent(fields, True)


def deepseek_v3_latent(fields: Fields) -> Latent:
    """Pairs are neighbours unless `rope_interleave` is false."""
    return _latent(fields, fields.flag("rope_interleave", default=True))


def _latent(fields: Fields, interleaved: bool) -> Latent:
    if not fields.mentions("q_lora_rank"):
        fields.refuse("q_lora_rank", "a rank, or null for queries without one")
    rank = fields.take("q_lora_rank")
    latent = Latent(
        query_rank=None if rank is None else fields.integer("q_lora_rank", 1, MAX_RANK),
        rank=fields.integer("kv_lora_rank", 1, MAX_RANK),
        plain=fields.integer("qk_nope_head_dim", 1, MAX_SIZE),
        rotary=fields.integer("qk_rope_head_dim", 2, MAX_SIZE),
        value=fields.integer("v_head_dim", 1, MAX_SIZE),
        interleaved=interleaved,
    )
    # Both are derived; Transformers calls the rotated part the head.
    for name, size in (("head_dim", latent.rotary), ("qk_head_dim", latent.key)):
        if fields.has(name) and fields.take(name) != size:
            fields.refuse(name, f"{size}, or nothing")
        fields.take(name)
    return latent
