"""GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3 with a list of the layers with experts.

Reference implementation: `Glm4MoeLiteForCausalLM` in Hugging Face Transformers. GGUF files are
declared as `deepseek2`. The layer that predicts a further token is not used.
"""

from jaxserve.models.config.experts import Experts
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.rules import ConfigRules
from jaxserve.models.families.deepseek import (
    IGNORED,
    NEUTRAL,
    read_experts,
    v3_latent,
    v3_weights,
)
from jaxserve.models.family import Architecture, Family, FamilyTraits

KINDS = ("dense", "sparse")


def _experts(fields: Fields, layers: int) -> Experts:
    if not fields.has("mlp_layer_types"):  # Transformers ignores first_k_dense_replace then
        fields.neutral({"first_k_dense_replace": 1})
    return listed_experts(fields, layers, first=1)


def listed_experts(fields: Fields, layers: int, first: int) -> Experts:
    """Read experts of the layers that `mlp_layer_types` lists, or of all but the first layers.

    Args:
        fields: the fields.
        layers: number of layers.
        first: default of `first_k_dense_replace`, the number of dense layers without a list.
    """
    kinds = fields.take("mlp_layer_types")
    if kinds is None:
        first = fields.integer("first_k_dense_replace", 0, 1 << 20, default=first)
        kinds = ["dense" if index < first else "sparse" for index in range(layers)]
    elif not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {*KINDS}:
        fields.refuse("mlp_layer_types", f"{layers} of {' and '.join(map(repr, KINDS))}")
        kinds = ["sparse"] * layers
    first = next((index for index, kind in enumerate(kinds) if kind == "sparse"), layers)
    fields.neutral({"first_k_dense_replace": first})
    sparse = tuple(kind == "sparse" for kind in kinds)
    normalize = fields.flag("norm_topk_prob", default=True)
    return read_experts(fields, layers, True, normalize, sparse)


GLM4_MOE_LITE = Family(
    architectures={
        "Glm4MoeLiteForCausalLM": Architecture(
            ConfigRules(
                "glm4_moe_lite",
                neutral={**NEUTRAL, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
                ignored=IGNORED | {"num_nextn_predict_layers"},
                extra_layers="num_nextn_predict_layers",
                experts=_experts,
                latent=v3_latent,
            ),
            v3_weights,
            FamilyTraits(router="sigmoid"),
        ),
    },
)
