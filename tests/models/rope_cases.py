"""Rotary embeddings and kinds of layers of the tiny random checkpoints."""

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
# For 3 rotated pairs.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 5.0],
    "original_max_position_embeddings": 32,
}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 50.0}
FULL, SLIDING, CONV = "full_attention", "sliding_attention", "conv"
