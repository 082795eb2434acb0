"""Options of llama.cpp's server, as of build 11480, and our answer to each."""

from __future__ import annotations

import shlex
from collections.abc import Container

# What to write here for an option and its value, `{}`. A folder, file or name on the hub is no
# option here, so it stands alone.
EQUIVALENTS: dict[str, str] = {
    "-m --model": "{}",
    "-hf -hfr --hf-repo": "{}",
    "-c --ctx-size": "--max-model-len {}",
    "-np --parallel": "--max-num-seqs {}",
    "-b --batch-size -ub --ubatch-size": "--max-num-batched-tokens {}",
    "-a --alias": "--served-model-name {}",
    "-s --seed": "--seed {}",
    "--host": "--host {}",
    "--port": "--port {}",
    "--api-key": "--api-key ...",
    "--api-prefix": "--root-path {}",
    "--ssl-key-file": "--ssl-keyfile {}",
    "--ssl-cert-file": "--ssl-certfile {}",
    "--chat-template --chat-template-file": "--chat-template {}",
    "--chat-template-kwargs": "--default-chat-template-kwargs {}",
    "--cors-origins": "--allowed-origins {}",
    "--cors-methods": "--allowed-methods {}",
    "--cors-headers": "--allowed-headers {}",
    "--cors-credentials": "--allow-credentials",
    "--no-cors-credentials": "--no-allow-credentials",
    "--cache-prompt": "--enable-prefix-caching",
    "--no-cache-prompt": "--no-enable-prefix-caching",
    "-to --timeout": "--request-timeout {}",
    "-v --verbose --log-verbose": "--verbose",
    "--skip-chat-parsing": "--tool-call-parser none --reasoning-parser none",
}
# Values that stand for llama.cpp's own choice, and are left out here.
AUTOMATIC = ("0", "-1", "auto")

_DEVICE = "the whole model is on the device, a card where there is one: leave it out"
_CARDS = "--tensor-parallel-size divides a model over cards; CUDA_VISIBLE_DEVICES chooses them"
_THREADS = "all cores that the process may use compute: bind it with taskset or numactl"
_ALWAYS = "that is always so here: leave it out"
_REQUEST = "requests set it, and a folder's generation_config.json (--generation-config DIR)"
_NO_SAMPLER = "that sampler is not here: temperature, top_k, top_p, min_p and penalties are"
_FORM = "a request's response_format or structured_outputs says it"
_DRAFT = "no draft model is used: leave it out"
_TEXT_ONLY = "only text is served"
_NO_EMBEDDINGS = "models generate text here, and nothing else"
_LORA = "adapters are not served: merge them into the checkpoint"
_ROPE = "the checkpoint says it"
_CACHE = "pages of the KV cache are shared by all slots: kv_cache_memory_bytes is their size"
_CACHE_TYPE = (
    "--kv-cache-dtype fp8 or int8_per_token_head keep keys and values in 8 bits; the default in 16"
)
_LOG = "the log goes to standard error, a JSON object a line"
_READ = "files are read once, never mapped"
_NO_TOOLS = "no tool is run by the server"
_ROUTER = "a server loads its models at the start: jaxserve serve a=DIR b=DIR"
_HUB = "the hub's own library fetches models: HF_TOKEN, HF_HUB_OFFLINE in the environment"
_NAMED_MODEL = "name the model: jaxserve serve org/name"

REASONS: dict[str, str] = {
    "-ngl --gpu-layers --n-gpu-layers -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn "
    "-ot --override-tensor -kvo --kv-offload -nkvo --no-kv-offload --op-offload --no-op-offload "
    "--moe-cache-mib --no-host -fit --fit -fitt --fit-target -fitc --fit-ctx": _DEVICE,
    "-dev --device -sm --split-mode -ts --tensor-split -mg --main-gpu --rpc": _CARDS,
    "--list-devices": "nvidia-smi lists the cards",
    "-t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll "
    "-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch "
    "--numa --threads-http": _THREADS,
    "-fa --flash-attn --jinja -cb --cont-batching --metrics --repack -nr --no-repack --warmup "
    "--ui --webui --prefill-assistant --no-context-shift --slots --no-perf --perf "
    "--reasoning-preserve": _ALWAYS,
    "--no-jinja --no-warmup --no-ui --no-webui --no-prefill-assistant --no-slots -nocb "
    "--no-cont-batching --no-reasoning-preserve --no-skip-chat-parsing": (
        "that cannot be switched here: leave it out"
    ),
    "-n --predict --n-predict --temp --temperature --top-k --top-p --min-p --repeat-penalty "
    "--presence-penalty --frequency-penalty --ignore-eos -l --logit-bias -r --reverse-prompt "
    "-sp --special -rea --reasoning --reasoning-effort --reasoning-budget": _REQUEST,
    "--reasoning-budget-message": "the marks of the template alone end thoughts",
    "--reasoning-format": "--reasoning-parser names how thoughts are marked; none leaves them",
    "--keep --context-shift": "a request that outgrows the context ends there",
    "--samplers --sampler-seq --sampling-seq --top-nsigma --top-n-sigma --xtc-probability "
    "--xtc-threshold --typical --typical-p --repeat-last-n --dry-multiplier --dry-base "
    "--dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target "
    "--adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent "
    "-bs --backend-sampling": _NO_SAMPLER,
    "--grammar --grammar-file -j --json-schema -jf --json-schema-file": _FORM,
    "-e --escape --no-escape": "texts are taken as they are",
    "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf "
    "--spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd "
    "--threads-batch-draft --spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd "
    "--cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft "
    "--spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft "
    "--cpu-range-batch-draft -Crbd --spec-draft-cpu-range-batch --spec-draft-cpu-strict-batch "
    "--cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch "
    "--poll-batch-draft --spec-draft-override-tensor -otd --override-tensor-draft "
    "--spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe "
    "-ncmoed --n-cpu-moe-draft --spec-draft-n-max --spec-draft-n-min --spec-synth-len "
    "--spec-synth-rates --spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min "
    "--spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-sampling "
    "--spec-draft-device -devd --device-draft --spec-draft-ngl -ngld --gpu-layers-draft "
    "--n-gpu-layers-draft --spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v "
    "-ctvd --cache-type-v-draft --spec-type --spec-default --spec-ngram-mod-n-min "
    "--spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n "
    "--spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n "
    "--spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n "
    "--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --draft --draft-n --draft-max "
    "--draft-min --draft-n-min --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits "
    "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic": _DRAFT,
    "-mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload "
    "--no-mmproj-offload -mmdev --mmproj-device --image-min-tokens --image-max-tokens "
    "--mtmd-batch-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir "
    "--media-path": _TEXT_ONLY,
    "--embedding --embeddings --rerank --reranking --pooling --embd-normalize --spm-infill": (
        _NO_EMBEDDINGS
    ),
    "--lora --lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled "
    "--control-vector-layer-range": _LORA,
    "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
    "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv": _ROPE,
    "-ctk --cache-type-k -ctv --cache-type-v": _CACHE_TYPE,
    "--swa-full --kv-unified-per-slot -ctxcp --ctx-checkpoints --swa-checkpoints -cms "
    "--checkpoint-min-step -cram --cache-ram -kvu --kv-unified -no-kvu --no-kv-unified "
    "--cache-idle-slots --no-cache-idle-slots -dt --defrag-thold --cache-reuse -sps "
    "--slot-prompt-similarity --slot-save-path": _CACHE,
    "--log-disable --log-file --log-jsonl --no-log-jsonl --log-colors -lv --verbosity "
    "--log-verbosity --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps "
    "--log-prompts-dir": _LOG,
    "-lm --load-mode -lzm --lazy-mode --check-tensors": _READ,
    "--tools --tools-runtime --mcp-servers-config --mcp-servers-json -ag --agent -no-ag "
    "--no-agent --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy": (
        _NO_TOOLS
    ),
    "--models-dir --models-preset --models-max --models-autoload --no-models-autoload --tags": (
        _ROUTER
    ),
    "-hft --hf-token --offline -mu --model-url -dr --docker-repo": _HUB,
    "-hff --hf-file": "the file stands in the name: jaxserve serve org/name/FILE.gguf",
    "-cl --cache-list": "`hf cache ls` lists models of the hub that are here",
    "--completion-bash": "there are no completions for a shell",
    "--usage": "jaxserve serve --help lists the options",
    "--version": "jaxserve --version says it",
    "--api-key-file": "JAXSERVE_API_KEY in the environment holds keys, which commas separate",
    "--reuse-port": "one process listens on a port",
    "--path --ui-config --webui-config --ui-config-file --webui-config-file": (
        "the page at / is part of the package"
    ),
    "--props": "settings stay as they are until the server ends",
    "--sse-ping-interval": "streams hold events of answers alone",
    "--sleep-idle-seconds": "weights stay on the device until the server ends",
    "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default "
    "--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default "
    "--gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default": _NAMED_MODEL,
}
# Options that take no value.
_ALONE = frozenset(
    (
        "-cl --cache-list --completion-bash --swa-full --perf --no-perf -e --escape --no-escape "
        "-kvo --kv-offload -nkvo --no-kv-offload --repack -nr --no-repack --no-host "
        "--list-devices -cmoe --cpu-moe --check-tensors --op-offload --no-op-offload "
        "--log-disable --log-jsonl --no-log-jsonl -v --verbose --log-verbose --offline "
        "--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --ignore-eos -bs "
        "--backend-sampling --spec-draft-cpu-moe -cmoed --cpu-moe-draft "
        "--spec-draft-backend-sampling --no-spec-draft-backend-sampling -kvu --kv-unified -no-kvu "
        "--no-kv-unified --cache-idle-slots --no-cache-idle-slots --context-shift "
        "--no-context-shift -sp --special --warmup --no-warmup --spm-infill -cb --cont-batching "
        "-nocb --no-cont-batching --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload "
        "--no-mmproj-offload --reuse-port --cors-credentials --no-cors-credentials --ui-mcp-proxy "
        "--webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy -ag --agent -no-ag --no-agent "
        "--ui --webui --no-ui --no-webui --embedding --embeddings --rerank --reranking "
        "--cache-prompt --no-cache-prompt --metrics --props --slots --no-slots --models-autoload "
        "--no-models-autoload --jinja --no-jinja --reasoning-preserve --no-reasoning-preserve "
        "--skip-chat-parsing --no-skip-chat-parsing --prefill-assistant --no-prefill-assistant "
        "--lora-init-without-apply --embd-gemma-default --fim-qwen-1.5b-default "
        "--fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec "
        "--fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default "
        "--vision-gemma-4b-default --vision-gemma-12b-default --spec-default --usage --version"
    ).split()
)
_EQUIVALENT = {flag: here for flags, here in EQUIVALENTS.items() for flag in flags.split()}
_REASON = {flag: reason for flags, reason in REASONS.items() for flag in flags.split()}


def is_llama_flag(flag: str) -> bool:
    """Return whether llama.cpp's server has an option of this name."""
    return flag in _EQUIVALENT or flag in _REASON


def in_our_words(words: list[str], own: Container[str]) -> str | None:
    """Return what to say to a command line that holds options of llama.cpp's server.

    Args:
        words: after `jaxserve serve`.
        own: options that `jaxserve serve` has too, which alone reveal nothing.

    Returns:
        A sentence that spells the command out, and says why options are left out; None where no
        option is llama.cpp's alone.
    """
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    foreign = [flag for flag in flags if is_llama_flag(flag) and flag not in own]
    if not foreign:
        return None
    models, command, reasons = [], [], dict[str, list[str]]()
    pending = list(words)
    while pending:
        flag, equals, value = pending.pop(0).partition("=")
        if not is_llama_flag(flag):
            command.append(shlex.quote(flag + equals + value))
            continue
        if not (equals or flag in _ALONE) and pending and _is_value(pending[0]):
            value = pending.pop(0)
        here = _EQUIVALENT.get(flag)
        if here is None:
            reasons.setdefault(_REASON[flag], []).append(flag)
        elif "{}" not in here or value not in ("", *AUTOMATIC):
            (models if here == "{}" else command).append(here.format(shlex.quote(value)))
    # Models stand first, since an option may take all words after it.
    whole = " ".join(["jaxserve serve", *models, *command])
    said = f"{_listed(foreign)} of llama.cpp's server: here it is `{whole}`"
    return said + "".join(f"; {', '.join(names)}: {reason}" for reason, names in reasons.items())


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word[1:].replace(".", "", 1).isdigit()


def _listed(flags: list[str]) -> str:
    names = list(dict.fromkeys(flags))
    if len(names) == 1:
        return f"{names[0]} is an option"
    return f"{', '.join(names[:-1])} and {names[-1]} are options"
