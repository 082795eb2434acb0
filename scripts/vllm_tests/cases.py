"""Files of vLLM's tests that are run, and the reasons of tests that do not pass."""

from __future__ import annotations

from dataclasses import dataclass

FILES = (
    "entrypoints/openai/chat_completion/test_chat.py",
    "entrypoints/openai/chat_completion/test_chat_completion.py",
    "entrypoints/openai/chat_completion/test_chat_echo.py",
    "entrypoints/openai/chat_completion/test_batched_chat_completions.py",
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "entrypoints/openai/chat_completion/test_include_reasoning.py",
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "entrypoints/openai/chat_completion/test_root_path.py",
    "entrypoints/openai/chat_completion/test_thinking_token_budget.py",
    "entrypoints/openai/completion/test_completion.py",
    "entrypoints/openai/completion/test_prompt_validation.py",
    "entrypoints/openai/completion/test_token_in_token_out.py",
    "entrypoints/openai/test_return_token_ids.py",
    "entrypoints/openai/test_return_tokens_as_ids.py",
    "entrypoints/openai/test_chunked_prompt.py",
    "entrypoints/openai/models/test_models.py",
    "entrypoints/openai/responses/test_basic.py",
    "entrypoints/openai/responses/test_errors.py",
    "entrypoints/openai/responses/test_function_call.py",
    "entrypoints/openai/responses/test_namespace_tool_separator.py",
    "entrypoints/openai/responses/test_simple.py",
    "entrypoints/openai/responses/test_stateful.py",
    "entrypoints/openai/responses/test_structured_output.py",
    "entrypoints/anthropic/test_messages.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/serve/instrumentator/test_metrics.py",
    "entrypoints/serve/instrumentator/test_orca_metrics.py",
    "entrypoints/serve/instrumentator/test_uds.py",
)

NOT_RUN = {
    "files that start no server (test_serving_chat.py, test_completion_error.py, "
    "test_responses_utils.py and others)": "they call classes of vLLM's",
    "test_completion_with_prompt_embeds.py, test_chat_completion_with_prompt_embeds.py": (
        "embeddings in the place of prompts are not served"
    ),
    "test_lora_resolvers.py, test_lora_adapters.py": "LoRA is not served",
    "test_tensorizer_entrypoint.py": "a format of vLLM's",
    "test_harmony.py, test_mcp_tools.py, test_parsable_context.py": (
        "they judge what gpt-oss-20b and Qwen3-8B say, and need servers of tools"
    ),
    "test_lmeval.py": "it judges Qwen2-1.5B's answers",
    "test_extra_content_fields.py": "it needs the template of a model of 4 billion parameters",
    "test_decisions_e2e.py, sagemaker/, lora/, dev/rpc/": "routes of vLLM's alone",
    "test_optional_middleware.py": "classes of vLLM's, named by an option, around its application",
    "files of images, audio, embeddings and scores": "text is what is served",
}

# Left out of the arguments, with their values.
WITHOUT = [
    *("--enforce-eager", "--structured-outputs-config.backend", "--enable-lora"),
    *("--lora-modules", "--max-lora-rank", "--max-cpu-loras", "--max-loras"),
]
# Whose tokenizer or configuration the tests themselves ask for.
MODELS = (
    *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B", "Qwen/Qwen2-1.5B-Instruct"),
    *("Qwen/Qwen2.5-1.5B-Instruct", "HuggingFaceH4/zephyr-7b-beta", "typeof/zephyr-7b-beta-lora"),
    *("HuggingFaceTB/SmolLM2-135M-Instruct", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    *("charent/self_cognition_Alice", "meta-llama/Llama-3.2-1B-Instruct"),
    *("Jackmin108/Qwen3-0.6B-Meow-LoRA", "Jackmin108/Qwen3-0.6B-Woof-LoRA"),
)


@dataclass(frozen=True)
class Reason:
    """An explanation of tests that do not pass.

    Attributes:
        test: pattern in their names.
        why: pattern in the error.
        text: a clause for the table.
        applicable: whether the test is about features of this server.
    """

    test: str
    why: str
    text: str
    applicable: bool = False


WEIGHTS = "it judges what that model says"
ENDLESS = "the model does not end its JSON in time"
MUTE = "the model neither thinks nor calls tools by itself"
REASONS = (
    Reason("", "-lora` does not exist", "LoRA"),
    Reason("", "Cannot find an appropriate cached snapshot", "it downloads weights"),
    Reason("", "We couldn't connect to", "it downloads weights"),
    Reason("", "Skipped:", "vLLM's test leaves it out itself"),
    Reason("", "'image_url' is not supported", "images"),
    Reason("multimodal", "", "images"),
    Reason("", "kv_transfer_params", "caches are not handed between servers"),
    Reason("", "show_hidden_metrics_for_version", "no metrics of older versions are kept"),
    Reason("test_show_version", "", "it passes with vLLM's version number alone"),
    Reason("test_metrics_exist_run_batch", "", "it starts vLLM's own run-batch"),
    Reason(
        *("orca_header", "endpoint-load-metrics"),
        "no header of ORCA's has the load: /load and /metrics do",
        applicable=True,
    ),
    Reason("test_more_than_one_prompt_logprobs_chat", "assert 2 == 1", WEIGHTS),
    Reason("test_response_format_json", "'result'", WEIGHTS),
    Reason("test_previous_response_id", "assert 'Mark' in", WEIGHTS),
    Reason("test_two_responses_with_same_prev_id", "assert 'John' in", WEIGHTS),
    Reason("test_complex_message_content", "1+1", WEIGHTS),
    Reason("test_completion_streaming", "assert 'stop' == 'length'", WEIGHTS),
    Reason("test_echo_logprob_completion", "re.search", "token 0 is a special one of this model's"),
    Reason("test_chat_completion_with_tool_use", "<tool_call>", WEIGHTS),
    Reason("test_comparison_with_prompt_logprobs_and_logprobs", "<|im_end|>", WEIGHTS),
    Reason("return_tokens_as_token_ids_completion", "== ", WEIGHTS),
    Reason("test_structured_outputs_choice_chat", "!= 'TypeScript'", WEIGHTS),
    Reason("responses/test_basic", "assert '", WEIGHTS),
    Reason("test_function_calling_with_streaming", "1 >= 2", WEIGHTS),
    Reason("test_response_format_json_object", "Unterminated", ENDLESS),
    Reason("test_named_tool_use", "JSONDecodeError", ENDLESS),
    Reason("test_batched_chat_completions_with_json_schema", "ReadTimeout", ENDLESS),
    Reason("test_function_tool_use", "0 > 0", MUTE),
    Reason("test_function_tool_use", "None is not None", MUTE),
    Reason("test_include_reasoning", "easoning", MUTE),
    Reason("responses/", "None is not None", MUTE),
    Reason("responses/test_simple", "easoning", MUTE),
    Reason("responses/test_structured_output", "science fair", WEIGHTS),
    Reason("test_anthropic_tool_call", "'max_tokens' == 'tool_use'", MUTE),
    Reason(
        *("test_function_calling_with_streaming_types", "response.created"),
        "the model reaches its limit, and the response is incomplete",
    ),
    Reason("test_check_models", "IndexError", "LoRA"),
    Reason("", "watermark_config", "texts get no watermark"),
    Reason(
        *("test_single_c", "CompletionUsa"),
        "usage always says how many tokens of the prompt were cached",
        applicable=True,
    ),
    Reason(
        *("test_tokenize_chat_with_tools", "At index"),
        "tools are described in words where a template reads none",
        applicable=True,
    ),
    Reason(
        *("test_long_seed", "seed must be from"),
        "the refusal is worded otherwise",
        applicable=True,
    ),
    Reason(
        *("test_thinking_token_budget", "reasoning_config"),
        "--reasoning-parser says how thoughts are marked, --reasoning-config is refused",
        applicable=True,
    ),
    Reason(
        *("test_anthropic_streaming", "input_tokens"),
        "counts of the cache stand apart in the first event too, as Anthropic has them",
        applicable=True,
    ),
    Reason("test_chat_logit_bias", "assert '", "the refusal is worded otherwise", applicable=True),
    Reason("test_prompt_validation", "", "the refusal is worded otherwise", applicable=True),
)
