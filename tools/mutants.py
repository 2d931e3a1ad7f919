"""Mutation testing: does a test notice when a line of the reading core is wrong?

    pip install cosmic-ray                                        # its operators make most of the mutants
    python -m tools.mutants [--count 200] [--seed 0] [--part 1/4] [--list] [--only NUMBER,...] [--results results.jsonl]

A mutant is one small mistake in one file: a comparison turned round, a number off by one, a call or
an argument left out. The seed draws `--count` places of TESTS' files, each place with the same
chance, and one mistake for each. Every mutant is run against the tests that TESTS names for its
file, in a copy of this repository. It is killed when a test fails, or does not end in time.
docs/mutants.md has the score, and an explanation of each mutant that lived.

Torch is imported once, and every mutant gets a fork of this process: a mutant costs the seconds of
its tests and no more. `--results` appends a line for each mutant and leaves out those that the file
has already, so that a run can be continued.
"""

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "checkpoint",
    "configs",
    "data",
    "models",
    "parallelisms",
    "reliability",
    "tests",
    "tools",
    "train",
    "training",
)
LIMIT = 300  # seconds that the tests of a mutant may take; a mutant that takes longer is killed

MODEL = ["models", "hf_parity::test_equals_hugging_face"]
FILES_OF_OTHERS = [
    "convert::test_metas_files",
    "convert::test_bad_folder_of_meta",
    "convert::test_bad_hugging_face_folder",
    "convert::test_what_transformers_does_not_read_either_is_left_out",
    "convert::test_in_and_out_again",
]
RULES = [
    "config::test_rule",
    "config::test_no_number_of_a_model_may_be_below_its_least",
    "config::test_architecture_of_a_flavor_with_overrides",
    "config::test_the_width_of_a_head_follows_from_that_of_the_model",
    "config::test_a_family_with_experts_may_have_none",
    "config::test_every_option_can_be_set_and_reads_back",
]
FLAVORS = [
    *RULES,
    "models::test_published_totals",
    "models::test_numbers_that_no_total_shows",
    "models::test_every_number_of_a_flavor_is_the_published_one",
    "models::test_debug_flavors_are_small_and_otherwise_alike",
    "models::test_a_toy_has_the_width_that_is_asked_for",
]
FSDP, TP, PP = (
    f"parallel::test_mesh_equals_the_plain_model[{mesh}]" for mesh in ("fsdp2", "tp2", "pp2")
)
HSDP = "parallel::test_cpu_offload_equals_the_plain_model[hsdp2x2]"
CP = "context::test_mesh_equals_the_plain_model[cp2]"
EP = "experts::test_mesh_equals_the_plain_model[ep2]"
EXPERTS_TP = "experts_tp::test_mesh_equals_the_plain_model[tp2]"
ZBV, INTERLEAVED = (
    f"parallel::test_every_schedule_equals_the_plain_model[pp2-{name}]"
    for name in ("zbv", "interleaved_1f1b")
)
CONTRACT = "contract::test_broken_contracts_are_named_on_every_rank"
# File -> its tests, the quickest first: a file of tests/, or one function of it. The first failure
# ends a mutant's run.
TESTS = {
    "train.py": [
        "config::test_command_line",
        "train::test_a_missing_corpus_is_a_sentence",
        "train::test_a_run_leaves_what_the_readme_says",
        "train::test_a_finished_run_has_nothing_to_do",
        "train::test_metrics_are_logged_at_the_first_step_every_few_and_at_the_last",
        "run_folder::test_metrics_and_the_last_words_have_the_goodput",
        "run_folder::test_the_seconds_of_closing_the_batches_are_none_of_a_save",
        "ranks::test_a_step_costs_no_collective_for_what_the_ranks_agree_on",
        "signals::test_n6_a_batch_has_its_own_seconds_besides_those_of_the_step",
        "speed::test_a_step_that_is_skipped_by_the_kernel_leaves_no_trace",
        "contract::test_only_experts_that_ranks_share_have_a_mesh_of_their_own",
        "train::test_no_room_to_write_is_a_sentence_and_leaves_what_was_saved",
        "train::test_a_tokenizer_larger_than_the_model_is_a_sentence",
        "parallelisms::test_a_run_asks_for_deterministic_kernels_and_collects_garbage_at_its_own_times",
        "speed::test_a_profile_shows_the_phases_of_a_step",
        "train::test_a_checkpoint_of_another_run_is_a_sentence_and_stays",
        "health::test_n1_a_batch_without_a_number_leaves_no_trace_in_the_weights",
        "train::test_a_step_without_a_finite_gradient_is_skipped_by_all_ranks",
        "health::test_a_spike_is_named_and_skipped_also_after_a_resume",
        "train::test_a_signal_to_one_rank_stops_all_at_the_same_step",
        "train::test_kill_9_and_resume_on_the_same_mesh_is_bitwise",
        "health::test_n2_what_fails_at_the_same_step_again_and_again_is_not_tried_for_ever",
        "health::test_n3_a_run_whose_replicas_part_stops_before_it_saves",
        "health::test_n4_a_slow_rank_and_what_it_is_slow_at_are_named",
        "collectives::test_n3_a_rank_whose_recomputed_gradient_differs_is_named",
        "health::test_c3_ranks_that_are_not_alike_do_not_start",
        "convert::test_a_run_starts_from_hugging_face_and_ends_there",
        "compare_runs::test_the_same_run_is_bitwise_equal_whatever_the_machine_did",
        "experts::test_a_balancing_bias_moves_against_the_load_and_not_in_a_skipped_step",
        EP,
        FSDP,
        ZBV,
    ],
    "models/__init__.py": [*RULES, "models"],
    "models/options.py": RULES,
    "models/flavors/__init__.py": RULES,
    "models/flavors/llama.py": FLAVORS,
    "models/flavors/qwen3.py": FLAVORS,
    "models/flavors/deepseek_v3.py": FLAVORS,
    "models/flavors/olmo2.py": FLAVORS,
    "models/flavors/gpt_oss.py": FLAVORS,
    "models/formats/dense.py": [*MODEL, *FILES_OF_OTHERS],
    "models/formats/llama.py": [*MODEL, *FILES_OF_OTHERS],
    "models/formats/qwen3.py": [*MODEL, *FILES_OF_OTHERS],
    "models/formats/deepseek_v3.py": [*MODEL, *FILES_OF_OTHERS],
    "models/formats/gpt_oss.py": ["gpt_oss", *MODEL, *FILES_OF_OTHERS],
    "models/formats/layouts.py": ["gpt_oss", *FILES_OF_OTHERS],
    "models/formats/olmo2.py": ["olmo2", *MODEL, *FILES_OF_OTHERS],
    "models/formats/torchtitan.py": ["dcp"],
    "models/family.py": [
        "models",
        *RULES,
        "structure::test_only_models_know_the_names_of_a_familys_layers",
    ],
    "models/deepseek_v3.py": [
        *MODEL,
        *RULES,
        *FILES_OF_OTHERS,
        "plan_experts::test_counted_flops_are_those_of_active_parameters",
    ],
    "models/moe.py": [
        *MODEL,
        "experts::test_the_balance_loss_is_that_of_the_equations",
        "experts::test_a_router_multiplies_in_float32_whatever_the_type_of_the_weights",
        "expert_runs",
        *RULES,
        EP,
        EXPERTS_TP,
    ],
    "models/arithmetic.py": [*MODEL, "metrics::test_the_formula_is_what_torch_counts"],
    "models/layers.py": [
        *MODEL,
        *RULES,
        "masking::test_equals_hugging_face_on_each_document",
        TP,
        "training::test_every_parameter_of_llama_is_filled_and_norms_are_ones",
        "training::test_what_returns_to_the_residual_stream_begins_smaller_by_its_depth",
        "training::test_norms_are_not_decayed",
        *FILES_OF_OTHERS,
    ],
    "models/llama.py": [*MODEL, *RULES, *FILES_OF_OTHERS],
    "models/qwen3.py": [*MODEL, *RULES, *FILES_OF_OTHERS],
    "models/olmo2.py": ["olmo2", *MODEL, *RULES, *FILES_OF_OTHERS],
    "models/yarn.py": MODEL,
    "models/gpt_oss.py": ["gpt_oss", *MODEL, *RULES, *FILES_OF_OTHERS],
    "models/terms.py": ["terms"],
    "models/lora.py": ["lora"],
    "parallelisms/lora.py": ["lora"],
    "models/kernels/causal_attention.py": ["hf_parity::test_equals_hugging_face"],
    "models/kernels/cpu/causal_attention.py": [
        "speed::test_attention_on_cpu_is_as_near_to_float64_as_pytorchs",
        "speed::test_sharp_attention_has_the_gradient_of_the_plain_one",
        "speed::test_attention_compiles_whole",
        "hf_parity::test_equals_hugging_face",
    ],
    "models/kernels/ruled_attention.py": ["attention_rules"],
    "models/kernels/precision.py": ["float64", FSDP],
    "models/kernels/combine.py": [EP],
    "models/kernels/grouped_product.py": [
        "experts::test_the_kernel_of_gpus_needs_bfloat16_and_widths_of_16_bytes",
        "experts::test_counts_of_other_groups_than_the_weights_are_an_error",
        "experts::test_the_kernel_of_gpus_computes_what_the_loop_does",
        "hf_parity::test_equals_hugging_face[qwen3 experts]",
        EP,
        "experts::test_compiled_mesh_equals_the_plain_model",
    ],
    "models/kernels/cpu/document_attention.py": [
        "masking::test_long_documents_on_a_cpu_equal_one_by_one",
        "masking::test_the_operator_keeps_pytorchs_contracts",
        "masking::test_bfloat16_is_near_float32",
        "masking::test_packed_documents_equal_each_document_alone[one]",
        "context::test_attention_of_the_last_queries_of_documents",
    ],
    "models/kernels/document_attention.py": [
        "masking::test_documents_are_found_in_positions",
        "masking::test_one_by_one_equals_each_document_alone",
        "masking::test_long_documents_on_a_cpu_equal_one_by_one",
        "masking::test_the_operator_keeps_pytorchs_contracts",
        "masking::test_bfloat16_is_near_float32",
        "masking::test_packed_documents_equal_each_document_alone[one]",
        "masking::test_the_cuda_path_with_stand_in_kernels",
        "masking::test_what_the_kernel_of_gpus_takes",
        "context::test_attention_of_the_last_queries_of_documents",
        "context::test_compiled_mesh_equals_the_plain_model",
    ],
    "parallelisms/__init__.py": [
        "attention_rules::test_a_core_that_says_nothing_is_refused_by_name",
        "parallelisms",
        "parallel::test_checkpointing_recomputes_what_it_says_and_keeps_less",
        FSDP,
        "speed::test_float8_learns_what_bfloat16_learns",
    ],
    "parallelisms/blocks.py": [
        "parallelisms",
        "parallel::test_checkpointing_recomputes_what_it_says_and_keeps_less",
        "masking::test_the_names_that_selective_checkpointing_keeps_exist",
        FSDP,
    ],
    "training/attention.py": ["parallelisms", "parallel::test_what_needs_a_gpu_says_so"],
    "parallelisms/fsdp_details.py": ["parallelisms", EP],
    "parallelisms/tp_plain.py": [EXPERTS_TP, "experts_tp", "olmo2"],
    "parallelisms/async_tp.py": ["parallel::test_what_needs_a_gpu_says_so"],
    "parallelisms/masters.py": [
        "parallelisms",
        "speed::test_a_weight_that_changes_between_steps_is_seen_by_the_next_forward",
        "speed::test_masters_of_one_rank_are_bitwise_those_of_fsdp2",
    ],
    "parallelisms/neighbours.py": ["pipeline", PP],
    "parallelisms/progress.py": ["parallelisms", "contract"],
    "parallelisms/contract.py": [
        "contract",
        "health::test_c3_ranks_that_are_not_alike_do_not_start",
    ],
    "parallelisms/cores.py": ["attention_rules"],
    "parallelisms/tp_check.py": ["tp_check"],
    "parallelisms/whole_matrices.py": ["muon"],
    "parallelisms/cp.py": [
        "attention_rules::test_a_mesh_equals_one_process",
        "check::test_what_needs_a_gpu_is_a_sentence_also_with_device_auto",
        "check::test_keys_that_no_gpu_kernel_takes_are_refused_on_a_machine_with_a_gpu",
        "context::test_the_width_of_a_head_is_what_the_kernel_is_asked_about",
        "context::test_checkpointing_sends_nothing_twice_that_it_says_to_keep",
        CP,
        "experts::test_mesh_equals_the_plain_model[ep2 of cp2]",
        "context::test_compiled_mesh_equals_the_plain_model",
        "context::test_activations_fall_with_the_number_of_ranks",
    ],
    "parallelisms/ep.py": [
        EP,
        EXPERTS_TP,
        "experts_tp::test_checkpoints_take_the_right_boxes_and_replicas_are_alike",
        "experts::test_one_expert_gets_every_token",
    ],
    "parallelisms/ep_hosts.py": ["ep_hosts"],
    "parallelisms/ep_chunks.py": ["ep_hosts"],
    "parallelisms/in_flight.py": ["ep_hosts", EP],
    "parallelisms/pp.py": [
        "schedules",
        ZBV,
        "pipeline::test_validation_counts_every_microbatch_whether_the_ranks_divide_them_or_not",
        "pipeline::test_messages_that_are_not_the_expected_ones_are_named",
        PP,
        INTERLEAVED,
        "masking::test_packed_documents_equal_each_document_alone[pp2]",
        "attention_rules::test_documents_are_told_for_the_windows_of_all_stages_of_a_rank",
        "pipeline::test_a_stage_that_waits_for_another_does_not_count_as_slow",
        "plan_pipeline::test_memory_of_every_rank_is_that_of_a_real_step",
    ],
    "parallelisms/schedules.py": [
        "schedules",
        "models::test_stages_of_a_pipeline_are_the_whole_model",
        "plan_pipeline::test_the_report_and_the_page_show_every_rank",
        "plan_pipeline::test_documented_drawings_are_those_that_are_drawn",
        ZBV,
        INTERLEAVED,
    ],
    "parallelisms/dp.py": [
        "parallelisms",
        "speed::test_masters_of_one_rank_are_bitwise_those_of_fsdp2",
        "contract::test_gradients_reach_the_shards_with_the_last_microbatch_only",
        FSDP,
        HSDP,
        "parallel::test_cpu_offload_equals_the_plain_model",
        EP,
    ],
    "parallelisms/float8.py": [
        "speed::test_float8_needs_its_gpu_and_whole_tiles",
        "speed::test_without_torchao_float8_is_a_sentence",
        "check::test_what_needs_a_gpu_is_a_sentence_also_with_device_auto",
        "speed::test_float8_learns_what_bfloat16_learns",
    ],
    "parallelisms/mesh.py": ["parallelisms", "contract", FSDP, HSDP, PP],
    "parallelisms/tp.py": [
        CONTRACT,
        "parallelisms::test_a_misspelt_row_of_the_plan_of_tensor_parallelism_is_named_also_in_a_pipeline",
        "parallel::test_what_needs_a_gpu_says_so",
        TP,
        "parallel::test_compiled_mesh_equals_the_plain_model",
    ],
    "training/balance.py": [
        "experts::test_a_balancing_bias_moves_against_the_load_and_not_in_a_skipped_step",
        "hf_parity::test_equals_hugging_face[deepseek_v3]",
        EP,
        EXPERTS_TP,
    ],
    "training/experts.py": ["expert_runs"],
    "training/init.py": [
        "training::test_initial_values_never_change",
        "training::test_initial_values_are_a_truncated_normal",
        "training::test_initial_values_differ_by_name_and_seed",
        "training::test_shards_equal_slices_of_the_whole",
        "training::test_a_parameter_that_no_row_matches_is_an_error",
        "training::test_every_parameter_of_llama_is_filled_and_norms_are_ones",
    ],
    "training/loss.py": [
        "training::test_the_loss_of_bfloat16_rounds_the_logits_and_nothing_after_them",
        "training::test_the_heads_gradient_is_summed_over_pieces_in_float32",
        "training::test_loss_equals_the_plain_one_and_never_holds_all_logits",
        "training::test_the_loss_of_every_token_can_be_had",
        "training::test_the_loss_has_the_gradients_that_are_asked_for",
        "training::test_the_loss_of_many_pieces_is_exact",
        "training::test_loss_of_large_logits_is_finite",
        "training::test_loss_of_a_batch_without_labels_is_zero_with_zero_gradient",
        "terms::test_the_z_loss_of_pieces_is_that_of_whole_logits",
        TP,
    ],
    "training/loss_passes.py": [
        "training::test_compiled_passes_compute_what_pytorchs_operators_do",
        "training::test_compiled_passes_are_made_once_and_have_no_float32_copy_of_a_piece",
    ],
    "training/optim.py": [
        "training::test_schedules",
        "training::test_wsd_decays_over_the_share_of_the_run_that_is_asked_for",
        "training::test_schedule_without_warm_up_starts_below_the_peak_and_warm_up_may_fill_the_run",
        "training::test_sgd_keeps_its_momentum",
        "training::test_each_option_of_the_optimizer_reaches_it",
        "training::test_norms_are_not_decayed",
        "training::test_clipping_scales_to_the_norm_and_reports_the_one_before",
        "training::test_the_norm_of_odd_gradients",
        "training::test_the_norm_of_a_long_gradient_is_exact",
        "training::test_a_gradient_that_is_still_to_be_summed_is_an_error",
        "training::test_the_norm_is_exact_on_any_mesh",
        "health::test_n1_a_batch_without_a_number_leaves_no_trace_in_the_weights",
        FSDP,
    ],
    "data/order.py": ["loader", "audit"],
    "data/shuffle.py": ["loader", "audit"],
    "data/splice.py": ["loader", "audit"],
    "data/masking.py": ["loader"],
    "data/chat.py": [
        "chat",
        "turns::test_a_template_that_ends_no_answer_by_a_token_has_no_end_of_turn",
    ],
    "data/packing.py": [
        "chat",
        "loader::test_batches_are_the_same_for_any_ranks_and_microbatches",
        "audit::test_when_a_document_is_seen_is_what_the_listing_says",
    ],
    "data/workers.py": ["loader"],
    "data/stores/blocks.py": ["stored_corpora"],
    "data/stores/corpus.py": ["stored_corpora"],
    "data/stores/text.py": ["stored_corpora"],
    "data/stores/places.py": ["stored_corpora"],
    "data/stores/ahead.py": ["stored_corpora"],
    "data/stores/upload.py": ["stored_corpora"],
    "data/stores/kept.py": ["stored_files"],
    "data/loader.py": [
        "loader",
        "mixture",
        "context::test_a_rank_reads_its_part_of_a_window_and_has_the_labels_of_the_whole",
    ],
    "checkpoint/state.py": [
        "golden::test_r6_an_old_checkpoint_loads",
        "checkpoint::test_hyperparameters_are_the_configs_and_the_difference_is_said",
        "checkpoint::test_the_rule_of_parts_cuts_every_tensor_into_boxes_that_fill_it",
        "checkpoint::test_state_made_in_advance_changes_no_step",
        "checkpoint::test_buffers_are_of_the_kind_that_fits_into_host_memory",
        "checkpoint::test_the_generator_of_a_gpu_gets_its_own_state",
        "checkpoint::test_copies_from_a_gpu_wait_for_the_values_and_say_when_they_are_done",
        "checkpoint::test_state_is_bitwise_the_same_on_another_mesh",
        "checkpoint::test_generators_go_on_where_they_were_on_the_same_mesh",
        "checkpoint::test_a_tool_loads_the_weights_alone",
        "checkpoint::test_a_checkpoint_of_another_run_is_refused_by_name",
        "checkpoint::test_a_new_run_starts_from_the_weights_of_another",
        "checkpoint::test_a_save_holds_the_state_of_its_call",
        "convert::test_into_a_live_mesh_and_out_of_its_checkpoint",
        "convert::test_a_live_mesh_refuses_another_model_on_every_rank",
        "contract::test_a_checkpoint_is_compared_with_what_all_ranks_hold",
    ],
    "checkpoint/place.py": ["stores", "checkpoint"],
    "reliability/objects.py": ["stores", "mirror", "stored_corpora"],
    "checkpoint/stores/bucket.py": ["stores"],
    "checkpoint/stores/lease.py": ["stores"],
    "checkpoint/verify.py": [
        "checkpoint::test_the_manifest_knows_how_many_bytes_a_number_has",
        "checkpoint::test_a_manifest_that_contradicts_itself_or_its_files_is_damaged",
        "checkpoint::test_a_newer_format_is_refused_by_name",
        "checkpoint::test_a_dimension_that_a_mesh_does_not_name_has_one_rank",
        "golden::test_the_generators_of_all_ranks_are_rows_of_one_tensor",
        "checkpoint::test_what_is_not_a_checkpoint_is_ignored",
        "checkpoint::test_a_shard_is_a_safetensors_file_and_verify_needs_no_torch",
        "checkpoint::test_a_rank_reads_and_verifies_only_the_blocks_it_needs",
        "checkpoint::test_no_file_of_a_checkpoint_can_run_code_or_leave_the_folder",
        "checkpoint::test_a_damaged_checkpoint_is_named_and_the_one_before_used",
        "checkpoint::test_going_back_starts_an_attempt_that_is_newer_than_the_future_it_replaces",
        "checkpoint::test_a_damaged_checkpoint_does_not_count_as_kept",
        "stores::test_a_header_that_a_network_damages_is_read_again",
        "compare_runs::test_weights_that_differ_under_equal_metrics_are_seen",
        "golden::test_r6_an_old_checkpoint_loads",
    ],
}


def arguments_of(tests: list[str]) -> list[str]:
    """pytest's: "loader" and "loader::test_x" are in tests/test_loader.py."""
    arguments = []
    for test in tests:
        file, mark, function = test.partition("::")
        arguments.append(f"tests/test_{file}.py{mark}{function}")
    return arguments


UNHARMED = "without a mutant"


class Mutant(NamedTuple):
    number: int
    path: str  # of the file, in the repository
    line: int
    kind: str  # what was done, in the words of cosmic-ray or of `left_out`
    source: str  # the whole file with the mistake in it

    @property
    def name(self) -> str:
        return f"{self.number} {self.path}:{self.line} {self.kind}"

    def difference(self) -> str:
        """The lines that changed, as a diff without its head."""
        old = (ROOT / self.path).read_text(encoding="utf-8")
        new = self.source
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def sample(files: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of these files, fewer if there are not as many places. A place is drawn
    first, then one of the mistakes that can be made there: otherwise an operator that can be
    replaced in twelve ways would be drawn twelve times as often."""
    places: dict[tuple[str, int, int, str], list] = {}
    for path in files:
        source = (ROOT / path).read_text(encoding="utf-8")
        for line, column, kind, make in [*left_out(source), *by_cosmic_ray(source)]:
            operator, *_ = kind.split("_")
            at_place = places.setdefault((path, line, column, operator), [])
            at_place.append((kind, make))
    generator = random.Random(seed)
    mutants = []
    order = sorted(places)
    generator.shuffle(order)
    for place in order:
        if len(mutants) == count:
            break
        kind, make = generator.choice(places[place])
        source = make()
        if source is not None and changes_code(
            source, (ROOT / place[0]).read_text(encoding="utf-8")
        ):
            mutants.append(Mutant(len(mutants), place[0], place[1], kind, source))
    return mutants


def changes_code(mutant: str, original: str) -> bool:
    """Whether the mutant is Python, and another program than the original."""
    try:
        return ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(original))
    except SyntaxError:
        return False


def left_out(source: str) -> Iterator[tuple]:
    """(line, column, kind, function that makes the source) for every statement that is a call or
    adds to a variable, which is replaced by `pass`, and for every keyword argument of a call, which
    is removed. cosmic-ray has neither."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def cut(node: ast.AST, instead: bytes, after: bytes = b"") -> str:
        text = b"".join(lines)
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        rest = text[end:]
        return (
            text[:begin]
            + instead
            + (rest.lstrip()[1:] if after and rest.lstrip().startswith(after) else rest)
        ).decode()

    for node in ast.walk(ast.parse(source)):
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if is_call or isinstance(node, ast.AugAssign):
            yield (
                node.lineno,
                node.col_offset,
                "statement left out",
                lambda node=node: cut(node, b"pass"),
            )
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg:
                    yield (
                        keyword.lineno,
                        keyword.col_offset,
                        "argument left out",
                        lambda node=keyword: cut(node, b"", b","),
                    )


def by_cosmic_ray(source: str) -> Iterator[tuple]:
    """The same for the operators of cosmic-ray, but not inside annotations, which no run evaluates."""
    try:
        from cosmic_ray import plugins
        from cosmic_ray.ast import ast_nodes, get_ast
        from cosmic_ray.mutating import mutate_code
    except ImportError:
        sys.exit("tools.mutants needs cosmic-ray: pip install cosmic-ray")
    annotations = set()
    for node in ast.walk(ast.parse(source)):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if part is not None:
                annotations |= {
                    (inner.lineno, inner.col_offset)
                    for inner in ast.walk(part)
                    if hasattr(inner, "lineno")
                }
                annotations |= {
                    (part.lineno, column) for column in range(part.col_offset, part.end_col_offset)
                }
    tree = get_ast(source)
    for name in sorted(plugins.operator_names()):
        if name.startswith("core/Variable"):  # they need arguments
            continue
        operator = plugins.get_operator(name)()
        occurrence = 0
        for node in ast_nodes(tree):
            for (line, column), _ in operator.mutation_positions(node):
                if (line, column) not in annotations:
                    make = partial(mutate_code, source, operator, occurrence)
                    yield line, column, name.removeprefix("core/"), make
                occurrence += 1


# Running them -------------------------------------------------------------------------------------


def import_heavy() -> None:
    """What every mutant's tests import and no mutant can change."""
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import safetensors  # noqa: F401
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.utils.checkpoint  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401


def copied(place: Path) -> Path:
    """A copy of the files that git knows."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    return place


def outcome(
    mutant: Mutant | None, place: Path, arguments: list[str], limit: float
) -> tuple[str, float, str]:
    """Whether the tests killed the mutant, their seconds, and the last lines of what pytest said.
    None: without a mutant."""
    path = place / mutant.path if mutant else None
    if path:
        path.write_text(mutant.source, encoding="utf-8")
    began = time.monotonic()
    log = place / "pytest.log"
    if (pid := os.fork()) == 0:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os._exit(tests_pass(place, arguments))
    code = None
    while code is None and time.monotonic() < began + limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.01)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if code is None:
        os.waitpid(pid, 0)
    if path:
        shutil.copy(ROOT / mutant.path, path)
    said = log.read_text(errors="replace").splitlines()
    verdict = {0: "lived", None: "killed (time)"}.get(code, "killed")
    failed = [line for line in said if line.startswith(("FAILED", "ERROR"))]
    return verdict, time.monotonic() - began, (failed or said or [""])[-1][:200]


def tests_pass(place: Path, arguments: list[str]) -> int:
    """pytest's exit code, in this process, with the modules of the copy."""
    import pytest

    for name in list(sys.modules):
        if name.split(".")[0] in PACKAGES:
            del sys.modules[name]
    os.chdir(place)
    others = [entry for entry in sys.path if entry not in ("", str(ROOT))]
    sys.path[:] = [str(place), *others]
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    return int(
        pytest.main(["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", *arguments])
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", default=list(TESTS), help="files of TESTS")
    parser.add_argument("--only", default="", help="numbers of mutants, with commas")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th mutant, from the I-th")
    parser.add_argument("--list", action="store_true", help="show the mutants and run none")
    parser.add_argument(
        "--results",
        default="",
        help="append the results to this file; those it has are not run again",
    )
    parser.add_argument("--most", type=int, default=10**9, help="run at most this many mutants now")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    mutants = [
        mutant
        for mutant in sample(options.files, options.count, options.seed)
        if mutant.number % parts == part - 1
    ]
    if options.only:
        mutants = [mutant for mutant in mutants if str(mutant.number) in options.only.split(",")]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}\n{mutant.difference()}")
        return 0
    results = Path(options.results) if options.results else None
    done = (
        {row["name"]: row for row in map(json.loads, results.read_text().splitlines())}
        if results and results.exists()
        else {}
    )

    def keep(row: dict) -> None:
        done[row["name"]] = row
        print(
            f"{row['name']}: {row['verdict']} in {row['seconds']:.0f} s  {row['said']}", flush=True
        )
        if results:
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")

    import_heavy()
    with tempfile.TemporaryDirectory() as folder:
        place = copied(Path(folder))
        # the tests must pass without a mutant, or they would kill every one
        if UNHARMED not in done:
            every = list(dict.fromkeys(test for mutant in mutants for test in TESTS[mutant.path]))
            verdict, seconds, said = outcome(None, place, arguments_of(every), 10 * LIMIT)
            if verdict != "lived":
                sys.exit(f"the tests fail without a mutant: {said}")
            keep({"name": UNHARMED, "verdict": "passed", "seconds": seconds, "said": said})
        for mutant in [mutant for mutant in mutants if mutant.name not in done][: options.most]:
            verdict, seconds, said = outcome(mutant, place, arguments_of(TESTS[mutant.path]), LIMIT)
            keep(
                {
                    "name": mutant.name,
                    "verdict": verdict,
                    "seconds": seconds,
                    "said": said,
                    "difference": mutant.difference(),
                }
            )
    verdicts = [row["verdict"] for name, row in done.items() if name != UNHARMED]
    killed = len(verdicts) - verdicts.count("lived")
    print(
        f"{killed} of {len(verdicts)} mutants killed"
        + (f": {killed / len(verdicts):.1%}" if verdicts else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
