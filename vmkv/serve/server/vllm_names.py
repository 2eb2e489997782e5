"""vLLM's names for the metrics of an engine, as dashboards and gateways read them.

They are made from the same samples as ours when they are asked for, with a label for the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

#: Our name without `vmkv_`, vLLM's without `vllm:`, and vLLM's name for the label.
_NAMES = (
    ("requests_running", "num_requests_running"),
    ("requests_waiting", "num_requests_waiting"),
    ("prompt_tokens", "prompt_tokens"),
    ("generation_tokens", "generation_tokens"),
    ("preemptions", "num_preemptions"),
    ("requests", "request_success"),
    ("prompt_tokens", "prefix_cache_queries"),
    ("prompt_tokens_cached", "prefix_cache_hits"),
    ("time_to_first_token_seconds", "time_to_first_token_seconds"),
    # The mean of a request, which vLLM has as a metric of its own.
    ("time_per_output_token_seconds", "inter_token_latency_seconds"),
    ("time_per_output_token_seconds", "request_time_per_output_token_seconds"),
    ("request_queue_seconds", "request_queue_time_seconds"),
    ("request_seconds", "e2e_request_latency_seconds"),
)
_LABELS = {"finish_reason": "finished_reason"}


def in_vllms_names(families: Iterable[Metric], model_names: Iterable[str]) -> Iterator[Metric]:
    """Yield metrics that have been reported, with the label `model_name`, under vLLM's names."""
    known = {family.name: family for family in families}
    for ours, theirs in _NAMES:
        family, name = known.get(f"vmkv_{ours}"), f"vllm:{theirs}"
        if family is not None:
            renamed = Metric(name, family.documentation, family.type)
            renamed.samples = [_renamed(family, name, each) for each in family.samples]
            yield renamed
    memory = known.get("vmkv_memory_bytes")
    if memory is not None:
        yield _usage(memory.samples)
    labels = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    adapters = Metric("vllm:lora_requests_info", "Adapters; none are served", "gauge")
    for name in model_names:
        adapters.add_sample(adapters.name, {**labels, "model_name": name}, 0.0)
    yield adapters


def _renamed(family: Metric, name: str, sample: Sample) -> Sample:
    labels = {_LABELS.get(key, key): value for key, value in sample.labels.items()}
    return sample._replace(name=name + sample.name.removeprefix(family.name), labels=labels)


def _usage(samples: Iterable[Sample]) -> Metric:
    usage = Metric("vllm:kv_cache_usage_perc", "Used share of the memory, 1 for all", "gauge")
    bytes_of: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in samples:
        labels = dict(sample.labels)
        state = labels.pop("state")
        bytes_of.setdefault(tuple(labels.items()), {})[state] = sample.value
    for replica, states in bytes_of.items():
        share = states["used"] / max(1.0, states["budget"])
        usage.add_sample(usage.name, dict(replica), share)
    return usage
