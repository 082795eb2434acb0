"""Bugs that latent attention could have on the device (see mutants).

The tests of a bug are a part of the usual run that notices it within seconds.
"""

from __future__ import annotations

from tests.scheduling.seeded_pool_bugs import Bug

LAYER = "jaxserve/models/latent.py"
PLAIN = "pallas_kernels/xla_latent.py"
KERNEL = "pallas_kernels/cpu/ragged.py"
TESTS = ("tests/models/test_parity.py", "-k", "deepseek_v3_groups")
KERNEL_TESTS = ("tests/kernels/test_latent.py", "-k", "specification or cut")


def _layer(name: str, old: str, new: str) -> Bug:
    return Bug(f"latents: {name}", LAYER, old, new, tests=TESTS)


LATENT_BUGS = (
    _layer(
        "the rotary part is cached unrotated",
        "            rotary = rotate(rotary, cos_sin, self.latent.interleaved)\n"
        "        latent = self.norm",
        "            rotate(rotary, cos_sin, self.latent.interleaved)\n        latent = self.norm",
    ),
    _layer(
        "the latent is cached before its norm",
        "latent = self.norm(joint[:, :rank])",
        "latent = joint[:, :rank]",
    ),
    _layer(
        "the rotary part of queries comes first",
        "return jnp.concatenate([absorbed, rotary], axis=-1)",
        "return jnp.concatenate([rotary, absorbed], axis=-1)",
    ),
    Bug(
        "latents: plain JAX reads values from the rotary part",
        PLAIN,
        "return out[..., : options.rank]",
        "return out[..., -options.rank :]",
        tests=TESTS,
    ),
    Bug(
        "latents: the CPU kernel reads values from the rotary part",
        KERNEL,
        "                code.call(products[1], [a, self.gathered, c, depth, shrinks])",
        "                b = code.at(self.gathered, const(self.H - self.V), self.real)\n"
        "                code.call(products[1], [a, b, c, depth, shrinks])",
        tests=KERNEL_TESTS,
    ),
    Bug(
        "latents: a tile sees the positions of its last query",
        KERNEL,
        "stop = code.sub(code.add(code.add(self.position, i), const(1)), block)",
        "stop = code.sub(code.add(code.add(self.position, self.number), const(0)), block)",
        tests=KERNEL_TESTS,
    ),
)
