"""The board of one server: its bytes and its answers."""

from board import JSON
from codes import symptom_codes
from panels import BAD_ABOVE_ZERO, Query, graph, stat, timeline
from promql import age, coded, increase, largest, of_vllm, total
from states import NOT_KNOWN, PULSES, SYMPTOMS, Look, numbered, yes_no


def _vllm(name: str) -> str:
    return of_vllm(name, 'instance=~"$vllm_instance"')


def integrity() -> list[JSON]:
    """What sweeps say of the bytes."""
    covered = total("flipwatch_weights_covered_bytes", by="job, instance, rank")
    return [
        stat(
            "Bytes covered by a digest",
            "What share of the weights a digest covers, rank by rank. What is not covered can change unseen. "
            "No data: no baseline, or the probe is away.",
            (6, 5),
            [
                Query(
                    f"{covered} / {total('flipwatch_weights_bytes', by='job, instance, rank')}",
                    "rank {{rank}} {{instance}}",
                )
            ],
            unit="percentunit",
            decimals=2,
        ),
        stat(
            "Changed chunks",
            "Chunks that were not those of the baseline in the last sweep, rank by rank. 0 says nothing of bytes that "
            "no digest covers, nor of a change before the baseline or after the sweep.",
            (6, 5),
            [Query(total("flipwatch_weights_changed_chunks", by="job, instance, rank"), "rank {{rank}} {{instance}}")],
            thresholds=BAD_ABOVE_ZERO,
        ),
        stat(
            "Checkpoint",
            "Whether the last check of the weights against the checkpoint on disk found nothing wrong. No data: it was "
            "never checked, or vLLM has restarted since.",
            (4, 5),
            [Query(largest("flipwatch_checkpoint_verified"), "{{instance}}")],
            mappings=yes_no(Look("verified", "green"), Look("differs", "red")),
        ),
        stat(
            "Age of what is taken as right",
            "Age of the baseline of the weights, of the clean profile, of the recorded states and of the recorded "
            "answers. What was wrong before that is taken as right. No data: nothing was recorded.",
            (8, 5),
            [
                Query(age("flipwatch_weights_baseline_timestamp_seconds"), "weights {{instance}}"),
                Query(age("flipwatch_profile_timestamp_seconds"), "profile {{instance}}"),
                Query(age("flipwatch_recording_timestamp_seconds"), "states {{instance}}"),
                Query(age("flipwatch_canary_recorded_timestamp_seconds"), "answers {{instance}}"),
            ],
            unit="s",
            decimals=0,
        ),
        graph(
            "Changed chunks over time",
            "From sweep to sweep. The line ends while the probe is away; a restart of vLLM loads the weights anew and "
            "takes a new baseline.",
            (12, 7),
            [Query(total("flipwatch_weights_changed_chunks", by="job, instance, rank"), "rank {{rank}} {{instance}}")],
        ),
        graph(
            "Chunks put right",
            "By where their bytes came from, around each moment. 0 does not say that nothing was to be put right.",
            (12, 7),
            [Query(increase("flipwatch_repaired_chunks_total", by="job, instance, method"), "{{method}} {{instance}}")],
            bars=True,
        ),
    ]


def answers() -> list[JSON]:
    """The pulse, the canary, and vLLM's own numbers."""
    return [
        timeline(
            "Pulse of vLLM",
            "Whether vLLM's own counters move while there is work. Idle says only that no request is there, not that "
            "one would be answered.",
            (12, 5),
            [Query(coded("flipwatch_pulse", "state", PULSES), "{{instance}}")],
            mappings=numbered(PULSES),
        ),
        timeline(
            "Symptom of the canary's answers",
            "What is wrong with the answers to the fixed prompts. No symptom speaks for these prompts only. Not known: "
            "the prompts could not be sent, or there is nothing to compare with.",
            (12, 5),
            [Query(symptom_codes("job, instance"), "{{instance}}")],
            mappings=numbered(SYMPTOMS, Look("not known", NOT_KNOWN)),
        ),
        graph(
            "Scatter of the answers",
            "Largest |change of log p| / (1 - p) of a token against the expected answers, and up to where that is "
            "rounding. Absent where another token came: then the symptom says so.",
            (12, 7),
            [
                Query(largest("flipwatch_canary_scatter", by="job, instance, reference"), "{{reference}} {{instance}}"),
                Query(largest("flipwatch_canary_scatter_allowed"), "allowed {{instance}}"),
            ],
            dashed=["/^allowed/"],
        ),
        graph(
            "Prompts with the symptom",
            "How many of the fixed prompts have it. 0 while nothing is known to compare with is no good sign: see "
            "the symptom.",
            (6, 7),
            [Query(largest("flipwatch_canary_wrong_prompts"), "{{instance}}")],
        ),
        graph(
            "Slowest answer",
            "Longest time that one answer of the canary took. Users' answers may be slower: theirs are longer.",
            (6, 7),
            [Query(largest("flipwatch_canary_answer_seconds"), "{{instance}}")],
            unit="s",
        ),
        graph(
            "Requests in vLLM",
            "Running and waiting, as vLLM counts them, of the chosen model and vLLM target. No data: Prometheus does "
            "not scrape vLLM itself, or under another model name.",
            (12, 7),
            [
                Query(f"sum by (instance) ({_vllm('num_requests_running')})", "running {{instance}}"),
                Query(f"sum by (instance) ({_vllm('num_requests_waiting')})", "waiting {{instance}}"),
            ],
        ),
        graph(
            "Tokens out of vLLM per second",
            "Tokens generated. A server that emits garbage has a good rate here. No data: see the panel to the left.",
            (6, 7),
            [
                Query(
                    f"sum by (instance) (rate({_vllm('generation_tokens_total')}[$__rate_interval]))",
                    "{{instance}}",
                )
            ],
        ),
        graph(
            "KV cache in use",
            "Share of vLLM's KV cache that is in use. Little of it says nothing of what is in it.",
            (6, 7),
            [Query(f"max by (instance) ({_vllm('kv_cache_usage_perc')})", "{{instance}}")],
            unit="percentunit",
        ),
    ]
