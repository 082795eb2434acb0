"""Names of vLLM's engine arguments that are no settings here, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest


class Unserved(NamedTuple):
    """An argument that is not served.

    Attributes:
        neutral: values that change nothing, and pass; None where every value does.
        instead: what to do where another was given.
    """

    neutral: tuple[Any, ...] | None
    instead: str


_DIVIDED = "tensor_parallel_size, nnodes and enable_expert_parallel say how a model is divided"
_REPLICAS = "replicas are a server's: jaxserve serve --data-parallel-backend ray"
_LORA = "adapters are not served: merge them into the checkpoint"
_TEXT_ONLY = "only text is served: leave it out"
_SIZES = "every step is a compiled program: decode_sizes and token_sizes choose their sizes"
_NO_SWAP = "weights and cache stay on the device: set kv_cache_memory_bytes, or quantization"
_CONFIG = "set it in hf_overrides, an object that takes the place of fields of config.json"
_NUMA = "bind the process from outside: numactl --cpunodebind=N --membind=N jaxserve ..."
_KERNELS = "jaxserve chooses kernels for its device; attention_backend names those of attention"
_NO_STATE = "no model with a recurrent state is served"
_LOADING = "files are read in order, as fast as the disk allows, with progress on standard error"
_NO_SLEEP = "LLM.close frees the device; make another one"
_MEASURED = "read /metrics of a server, LLM.stats(), or the page's view of the engine"
_SCHEDULING = "the scheduler takes max_num_seqs, max_num_batched_tokens and block_size as they are"
_HASHES = "prefixes are compared by their own keys, which do not collide"
_NO_TRANSFER = "weights are those of the checkpoint: start again with another"
_NO_PLUGIN = "no code of others runs in the engine: leave it out"


def _rows(instead: str, **neutral: tuple[Any, ...]) -> dict[str, Unserved]:
    """Return rows of arguments that have their reason in common."""
    return {name: Unserved(values, instead) for name, values in neutral.items()}


_SECRETS = ("hf_token",)  # which no log may hold
UNSERVED: dict[str, Unserved] = {
    "pipeline_parallel_size": Unserved((1,), _DIVIDED),
    "data_parallel_size": Unserved((1,), _REPLICAS),
    "distributed_executor_backend": Unserved(("uni",), _DIVIDED),
    "disable_custom_all_reduce": Unserved(
        (True, False), "all_reduce chooses how devices add their results"
    ),
    "enforce_eager": Unserved(
        (False,), f"{_SIZES}, and `jaxserve compile` builds them ahead of a start"
    ),
    "compilation_config": Unserved(({}, 0), _SIZES),
    "cuda_graph_sizes": Unserved(([],), _SIZES),
    "max_seq_len_to_capture": Unserved((), _SIZES),
    "enable_chunked_prefill": Unserved(
        (True,), "prompts are always computed in chunks: max_num_batched_tokens bounds them"
    ),
    "trust_remote_code": Unserved(
        (False,), "no code of a checkpoint is run, and what would need it is refused: leave it out"
    ),
    "swap_space": Unserved((0,), _NO_SWAP),
    "cpu_offload_gb": Unserved((0,), _NO_SWAP),
    "preemption_mode": Unserved(("recompute",), "preempted requests are computed again"),
    "disable_log_stats": Unserved((True, False), "read LLM.stats(), or /metrics of a server"),
    "enable_lora": Unserved((False,), _LORA),
    "lora_modules": Unserved(([],), _LORA),
    "tokenizer_mode": Unserved(("auto",), "tokenizer.json is read: name a folder with `tokenizer`"),
    "tokenizer_revision": Unserved((), "`revision` is that of model and tokenizer"),
    "code_revision": Unserved((), "no code of a checkpoint is run: leave it out"),
    "config_format": Unserved(("auto", "hf"), "config.json is read"),
    "rope_scaling": Unserved(({},), _CONFIG),
    "rope_theta": Unserved((), _CONFIG),
    "hf_token": Unserved((), "set HF_TOKEN in the environment"),
    "override_generation_config": Unserved(
        ({},), "name a folder with `generation_config`, or set SamplingParams"
    ),
    "task": Unserved(("auto", "generate"), "models generate text here, and nothing else"),
    "runner": Unserved(("auto", "generate"), "models generate text here, and nothing else"),
    "model_impl": Unserved(("auto", "vllm"), "models are jaxserve's own"),
    "device": Unserved(("auto",), "set JAX_PLATFORMS in the environment"),
    "speculative_config": Unserved(
        ({},), "no draft model is used: num_scheduler_steps makes launches of several steps"
    ),
    "limit_mm_per_prompt": Unserved(({},), _TEXT_ONLY),
    "mm_processor_kwargs": Unserved(({},), _TEXT_ONLY),
    "allowed_local_media_path": Unserved(("",), _TEXT_ONLY),
    "guided_decoding_backend": Unserved(("auto", "guidance"), "forms are compiled by llguidance"),
    "kv_transfer_config": Unserved(({},), "prompts are computed where answers are"),
    "enable_sleep_mode": Unserved((False,), "LLM.close frees the device; make another one"),
    "enable_prompt_embeds": Unserved((False,), "prompts are text or token ids"),
    "enable_log_requests": Unserved((False,), "requests are never logged"),
    "disable_log_requests": Unserved((True,), "requests are never logged"),
    "chat_template": Unserved((), "pass it to LLM.chat, or to jaxserve serve --chat-template"),
    **_rows(
        _DIVIDED,
        prefill_context_parallel_size=(1,),
        dcp_comm_backend=(),
        dcp_q_replicate=(False,),
        dcp_kv_cache_interleave_size=(1,),
        cp_kv_cache_interleave_size=(1,),
        distributed_timeout_seconds=(),
        cpu_distributed_timeout_seconds=(),
        data_parallel_rank=(0,),
        data_parallel_start_rank=(0,),
        data_parallel_size_local=(1,),
        data_parallel_address=(),
        data_parallel_rpc_port=(),
        data_parallel_backend=("mp",),
        data_parallel_hybrid_lb=(False,),
        data_parallel_external_lb=(False,),
        data_parallel_multi_port_external_lb=(False,),
        enable_hc_sp=(False,),
        enable_batch_sharded_sampling=(False,),
        enable_ep_weight_filter=(False,),
        enable_elastic_ep=(False,),
        elastic_ep_max_dp_size=(),
        expert_placement_strategy=("linear",),
        all2all_backend=("allgather_reducescatter",),
        enable_dbo=(False,),
        dbo_decode_token_threshold=(32,),
        dbo_prefill_token_threshold=(512,),
        ubatch_size=(0,),
        dp_sync_interval=(16,),
        disable_nccl_for_dp_synchronization=(True, False),
        enable_nccl_comm_suspend=(False,),
        ray_workers_use_nsight=(False,),
        max_parallel_loading_workers=(1,),
        enable_shm_tensor_arena=(False,),
        enable_fault_tolerance=(False,),
        fault_tolerance_config=({},),
        worker_cls=("auto",),
    ),
    **_rows(_NUMA, numa_bind=(False,), numa_bind_nodes=([],), numa_bind_cpus=([],)),
    "device_ids": Unserved((), "set CUDA_VISIBLE_DEVICES in the environment"),
    **_rows(
        _LORA,
        max_loras=(1,),
        max_lora_rank=(16,),
        max_cpu_loras=(),
        lora_dtype=("auto",),
        lora_target_modules=([],),
        default_mm_loras=({},),
        enable_tower_connector_lora=(False,),
        fully_sharded_loras=(False,),
        specialize_active_lora=(False,),
        enable_mixed_moe_lora_format=(False,),
        enable_moe_shared_loras=(False,),
        max_lora_cls_labels=(),
    ),
    **_rows(
        _TEXT_ONLY,
        allowed_media_domains=([],),
        enable_mm_embeds=(False,),
        media_io_kwargs=({},),
        mm_processor_cache_gb=(0, 4),
        mm_processor_cache_type=("lru",),
        mm_hasher_algorithm=("blake3",),
        mm_shm_cache_max_object_size_mb=(128,),
        mm_encoder_only=(False,),
        mm_encoder_tp_mode=("weights",),
        mm_encoder_attn_backend=(),
        mm_encoder_attn_dtype=(),
        mm_encoder_fp8_scale_path=(),
        mm_encoder_fp8_scale_save_path=(),
        mm_encoder_fp8_scale_save_margin=(1.5,),
        interleave_mm_strings=(False,),
        skip_mm_profiling=(True, False),
        video_pruning_rate=(0,),
        video_pruning_method=("evs",),
        mm_tensor_ipc=("direct_rpc",),
        mm_processor_device=("auto", "cpu"),
        mm_ipc_gpu_memory_gb=(0,),
        mm_device_do_normalize=(False,),
        disable_chunked_mm_input=(True, False),
        ec_transfer_config=({},),
        ec_manager_config=({},),
    ),
    **_rows(
        _SIZES,
        cudagraph_capture_sizes=([],),
        max_cudagraph_capture_size=(),
        cudagraph_metrics=(False,),
        optimization_level=(2,),
        performance_mode=("balanced",),
        jit_monitor_mode=("warn",),
        jit_monitor_verbose=(False,),
    ),
    **_rows(
        _KERNELS,
        attention_config=({},),
        kernel_config=({},),
        ir_op_priority=({},),
        enable_flashinfer_autotune=(True, False),
        monokernel=(False,),
        moe_backend=("auto",),
        linear_backend=("auto",),
        sparse_indexer_topk_backend=("auto",),
        disable_cascade_attn=(True, False),
        use_fp64_gumbel=(False,),
        enable_flash_late_interaction=(True, False),
    ),
    **_rows(
        _NO_STATE,
        mamba_backend=("triton",),
        mamba_ssu_algorithm=("auto",),
        enable_mamba_cache_stochastic_rounding=(False,),
        mamba_cache_philox_rounds=(0,),
        mamba_cache_dtype=("auto",),
        mamba_ssm_cache_dtype=("auto",),
        mamba_block_size=(),
        mamba_cache_mode=("none",),
        enable_mamba_shared_prefix_checkpoint=(False,),
        replayssm_buffer_len=(16,),
        use_replayssm=(False,),
        gdn_prefill_backend=(),
        kda_prefill_backend=("auto",),
        kda_decode_backend=("auto",),
        engram_config=({},),
    ),
    **_rows(
        _NO_SWAP,
        kv_offloading_size=(0,),
        kv_offloading_backend=("native",),
        offload_backend=("auto",),
        cpu_offload_params=([],),
        offload_group_size=(0,),
        offload_num_in_group=(1,),
        offload_prefetch_step=(1,),
        offload_params=([],),
    ),
    **_rows(
        _LOADING,
        safetensors_load_strategy=("lazy",),
        safetensors_prefetch_num_threads=(8,),
        safetensors_prefetch_block_size=(1 << 24,),
        model_loader_extra_config=({},),
        ignore_patterns=([], ["original/**/*"]),
        use_tqdm_on_load=(True, False),
        pt_load_map_location=("cpu",),
    ),
    **_rows(
        _NO_SLEEP,
        sleep_mode_backend=("cumem",),
        sleep_mode_offload_cudagraph=(False,),
        sleep_preserve_parameter_names=([],),
        enable_cumem_allocator=(False,),
    ),
    **_rows(
        _NO_PLUGIN,
        worker_extension_cls=("",),
        model_class_overrides=({},),
        logits_processors=([],),
        io_processor_plugin=(),
        scheduler_cls=(),
        reasoning_parser_plugin=("",),
        additional_config=({},),
    ),
    **_rows(
        _SCHEDULING,
        max_num_scheduled_tokens=(),
        max_num_active_seqs=(),
        long_prefill_token_threshold_adaptive=(False,),
        scheduler_reserve_full_isl=(True, False),
        watermark=(0, 0.0),
        prefill_schedule_interval=(1,),
        disable_hybrid_kv_cache_manager=(True, False),
        swa_bounded_replay=(True, False),
        kv_sharing_fast_prefill=(False,),
        disable_sliding_window=(False,),
        stream_interval=(1,),
        renderer_num_workers=(1,),
    ),
    **_rows(
        _HASHES,
        prefix_caching_hash_algo=("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
        prefix_cache_retention_interval=(0,),
        prefix_match_unit=(),
    ),
    **_rows(
        _MEASURED,
        show_hidden_metrics_for_version=(),
        collect_detailed_traces=([],),
        per_request_spec_decode_metrics=("none",),
        kv_cache_metrics=(False,),
        kv_cache_metrics_sample=(0.01,),
        custom_histogram_buckets=({},),
        enable_layerwise_nvtx_tracing=(False,),
        enable_mfu_metrics=(False,),
        enable_logging_iteration_details=(False,),
        aggregate_engine_logging=(False,),
        profiler_config=({},),
        enable_trace_replay=(False,),
    ),
    "convert": Unserved(("auto", "none"), "models generate text here, and nothing else"),
    "pooler_config": Unserved(({},), "models generate text here, and nothing else"),
    "diffusion_config": Unserved(({},), "models generate text here, one token after the other"),
    "hf_config_path": Unserved((), "config.json lies beside the weights: copy another there"),
    "quantization_config": Unserved(({},), "`quantization` names a form, int8, fp8 or int4"),
    "allow_deprecated_quantization": Unserved((True, False), "`quantization` lists its forms"),
    "kv_cache_dtype_skip_layers": Unserved(([],), "kv_cache_dtype holds for all layers"),
    "enable_return_routed_experts": Unserved((False,), "routes of experts are not returned"),
    "aux_output_config": Unserved(({},), "requests choose what they return"),
    "return_sampling_mask": Unserved((False,), "masks of the sampler are not returned"),
    "spec_method": Unserved((), "no draft model is used: leave it out"),
    "spec_model": Unserved((), "no draft model is used: leave it out"),
    "spec_tokens": Unserved((0,), "no draft model is used: leave it out"),
    "watermark_config": Unserved(({},), "texts get no watermark"),
    "reasoning_config": Unserved(({},), "reasoning_parser says how thoughts are marked"),
    "structured_outputs_config": Unserved(({},), "forms are compiled by llguidance"),
    "weight_transfer_config": Unserved(({},), _NO_TRANSFER),
    "watchdog_config": Unserved(({},), "health_timeout bounds a standstill of the engine"),
    "fail_on_environ_validation": Unserved(
        (True, False), "variables JAXSERVE_<FIELD> are always checked"
    ),
}


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Return whether a value requests nothing: it equals one of `neutral` and has its type."""
    return any(type(value) is type(other) and value == other for other in neutral)


def refuse_unsupported(
    fields: Mapping[Any, Any], unsupported: Mapping[str, tuple[Any, ...]], by: str = ""
) -> None:
    """Refuse fields that would otherwise be ignored silently.

    Args:
        fields: of a request.
        unsupported: names that are known and not supported, each with its neutral values.
        by: ends the message, such as " by this server".

    Raises:
        InvalidRequest: naming a field of `unsupported` whose value requests something.
    """
    for name in sorted(fields.keys() & unsupported.keys()):
        if not is_neutral(fields[name], unsupported[name]):
            raise InvalidRequest(f"{name} is not supported{by}", name)


def served(
    settings: Mapping[str, Any], rows: Mapping[str, Unserved] | None = None
) -> dict[str, Any]:
    """Return the settings without those that change nothing, None included.

    Args:
        settings: by name.
        rows: of names that are not served, `UNSERVED` by default.

    Raises:
        InvalidRequest: naming one that would change something, and what to do instead.
    """
    rows = UNSERVED if rows is None else rows
    for name, value in settings.items():
        row = rows.get(name)
        if row is None or row.neutral is None or value is None:
            continue
        if not any(
            isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
            for neutral in row.neutral
        ):
            shown = name if name in _SECRETS else f"{name}={value!r}"
            raise InvalidRequest(f"{shown} is not supported: {row.instead}", name)
    return {name: value for name, value in settings.items() if name not in rows}
