"""Mixtral (Mistral AI 2024, arXiv:2401.04088): Llama with experts in place of the MLP.

Reference implementation: `MixtralForCausalLM` in Hugging Face Transformers.
"""

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.families.llama import FINAL_NORM, PRE_NORMS, attention_projections
from jaxserve.models.weight_table import WeightName, embedding_weights, every_layer


def mixtral_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    layer = [
        *PRE_NORMS,
        *attention_projections(config),
        *expert_weights(config, "block_sparse_moe", ("w1", "w3", "w2")),
    ]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def expert_weights(
    config: ModelConfig,
    block: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[WeightName]:
    """One layer's router and experts, each matrix a tensor of its own.

    Args:
        config: of a model with experts.
        block: what the block is called in the checkpoint.
        names: of an expert's gate, upward and downward projections.
    """
    gate, up, down = names
    layer = [WeightName(f"{block}.gate.weight", "E D -> D E", "mlp.router")]
    for index in range(config.experts.count if config.experts else 0):
        one = f"{block}.experts.{index}"
        layer += [
            WeightName(
                f"{one}.{gate}.weight", "M D -> D M", "mlp.gate_up", (index, ..., 0, slice(None))
            ),
            WeightName(
                f"{one}.{up}.weight", "M D -> D M", "mlp.gate_up", (index, ..., 1, slice(None))
            ),
            WeightName(f"{one}.{down}.weight", "D M -> M D", "mlp.down", (index,)),
        ]
    return layer
