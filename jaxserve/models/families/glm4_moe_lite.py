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
    # Without a list the first layer is dense, whatever `first_k_dense_replace` says.
    kinds = fields.take("mlp_layer_types")
    if kinds is None:
        fields.neutral({"first_k_dense_replace": 1})
        kinds = ["dense", *["sparse"] * (layers - 1)]
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
