"""Faults that tests must find, as changes of files: ``tests/mutations.py`` puts them back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A fault: other text in place of some in a file."""

    file: str
    text: str
    other: str

    @property
    def is_native(self) -> bool:
        """Whether the modules have to be built again."""
        return self.file.startswith("csrc/")

    def put_into(self, source: str) -> str:
        """Returns the text of the file with the fault."""
        assert source.count(self.text) == 1, f"{self.file} does not have once: {self.text}"
        return source.replace(self.text, self.other)


MUTATIONS = {
    "a promotion keeps what was promoted before": [
        Mutation(
            "torch_ckpt/ladder/promotion_steps.py",
            ".state = _State.WAITS if self._is_chosen else _State.UNCHOSEN",
            ".state = self._of(step).state",
        )
    ],
    "a window begins at any byte": [
        Mutation(
            "csrc/engine/save/save_job.cc",
            "align_down(nbytes, std::max(alignment, kSmallAlignment))",
            "align_down(nbytes, alignment)",
        ),
        Mutation("csrc/engine/save/save_job.cc", "cursor_ % kSmallAlignment != 0", "false"),
    ],
    "a window is cut within an element": [
        Mutation(
            "csrc/engine/save/save_job.cc",
            "constexpr int64_t kPackChunk = int64_t{128} << 10;",
            "constexpr int64_t kPackChunk = (int64_t{128} << 10) - 4;",
        )
    ],
    "a part of a box goes to the begin of its target": [
        Mutation(
            "csrc/geometry/overlap.cc",
            "out.dst_offset += begin * copy.dst_strides[dim];",
            "",
        )
    ],
    "a box is its offsets alone": [
        Mutation(
            "csrc/plan/check_boxes.cc",
            "{ return slots_->words(slot); };",
            "{ return slots_->words(slot).first(slots_->words(slot).size() / 2); };",
        )
    ],
    "a plan is stale": [
        Mutation(
            "torch_ckpt/planning/save_planner.py",
            'digest_of(encoded, paths or b"", options.encode())',
            'digest_of(paths or b"", options.encode())',
        )
    ],
    "each box is of a replica of its own": [
        Mutation("csrc/plan/global_plan.cc", "if (from_one) return", "if (false) return")
    ],
    "a stride is wrong": [
        Mutation(
            "csrc/device/transpose.cc",
            "dst + row * copy.dst_row_stride + column * copy.dst_column_stride);",
            "dst + row * copy.dst_row_stride + column * int64_t{sizeof(Unit)});",
        )
    ],
    "a snapshot is used again too soon": [
        Mutation("torch_ckpt/staging/staged.py", "if self.is_over:", "if True:")
    ],
    "training goes on before it is copied": [
        Mutation("torch_ckpt/staging/stager.py", "            copying.result()", "            pass")
    ],
    "a tensor is plain whatever attributes it has": [
        Mutation(
            "csrc/bindings/state_dict.cc",
            "if (!is_tensor(object) || has_attributes(object)) return std::nullopt;",
            "if (!is_tensor(object)) return std::nullopt;",
        )
    ],
    "a copy lacks the attributes of a tensor": [
        Mutation(
            "torch_ckpt/staging/copied_state.py",
            "            copy_attributes(x, y)",
            "            pass",
        )
    ],
    "an empty box hides another": [
        Mutation(
            "torch_ckpt/planning/local_shards.py",
            "found = [box for box in self.boxes if box[1].numel()]",
            "found = self.boxes",
        )
    ],
    "a save decides by samples alone": [
        Mutation("torch_ckpt/storage/reuse.py", "if box[5:] == found:", "if box[5:] or found:")
    ],
    "a run of a joint read is at a wrong offset": [
        Mutation(
            "csrc/engine/read_stream.cc",
            "slice(bytes, range.begin - offset, range.nbytes());\n",
            "slice(bytes, i > task.first ? range.begin - offset - 1 : range.begin - offset,\n"
            "                               range.nbytes());\n",
        )
    ],
    "two numbers in a byte are counted as one": [
        Mutation(
            "torch_ckpt/formats/safetensors/layout.py",
            "sizes[-1] *= PACKED[facts.dtype]",
            "sizes[-1] *= 1",
        )
    ],
    "a common element of two tensors in an object is stored twice": [
        Mutation(
            "torch_ckpt/staging/pickling.py", "runs_of(used, keeps_sharing=True)", "runs_of(used)"
        )
    ],
    "a tensor in an object is put over another part of its memory": [
        Mutation(
            "torch_ckpt/staging/pickling.py",
            "(moved, copy.storage_offset(), sizes",
            "(moved, 0, sizes",
        )
    ],
    "an object within a state dict is not restored": [
        Mutation(
            "torch_ckpt/coordination/statefuls.py",
            "if not restore_pickled(node.live, loaded):",
            "if node.fqn == '':",
        )
    ],
    "an object within a tuple is not restored": [
        Mutation(
            "torch_ckpt/coordination/statefuls.py",
            "        values[key] = _restore(inner, values[key])",
            "        if not isinstance(live, tuple):\n"
            "            values[key] = _restore(inner, values[key])",
        )
    ],
    "a rank has the state of the first one": [
        Mutation(
            "torch_ckpt/planning/rank_state.py",
            "own = _key(self.rank, self.world_size)",
            "own = _key(0, self.world_size)",
        ),
        Mutation(
            "torch_ckpt/planning/rank_state.py",
            "own = entries.get(_key(rank, world_size))",
            "own = entries.get(_key(0, world_size), entries.get(_key(rank, world_size)))",
        ),
    ],
    "an object below the top is pickled": [
        Mutation("torch_ckpt/storage/rank_work.py", "refuse_statefuls(planner.state_dict)", "pass")
    ],
    "an object that takes no state is not named": [
        Mutation(
            "torch_ckpt/coordination/statefuls.py",
            '        with naming("load", node.fqn):',
            "        if True:",
        )
    ],
    "a value that cannot be staged is not named": [
        Mutation(
            "torch_ckpt/staging/stager.py",
            '            naming_first("stage", lambda: flat_values(state_dict), self._try),',
            "            contextlib.nullcontext(),",
        )
    ],
    "a state dict that cannot be made is not named": [
        Mutation(
            "torch_ckpt/coordination/statefuls.py",
            "        with naming(action, fqn):",
            "        if True:",
        )
    ],
    "tensors in the same memory are loaded in any order of files": [
        Mutation(
            "torch_ckpt/storage/load_source.py",
            "self.tensors.sort(key=lambda tensor: files[tensor[1][0]])",
            "pass",
        )
    ],
    "a tensor that torch reads comes after all others": [
        Mutation(
            "torch_ckpt/storage/loading.py",
            "self._load_streams(remaining)  # A later",
            "pass  # A later",
        ),
        Mutation(
            "torch_ckpt/storage/loading.py",
            "remaining = self._load_batch(batch, late, exchange)",
            "remaining += self._load_batch(batch, late, exchange)",
        ),
    ],
    "two tensors in the same memory are loaded at once": [
        Mutation(
            "torch_ckpt/storage/loading.py",
            "if later.overlaps(target, fqn) or destinations.overlaps(target, fqn):",
            "if later.overlaps(target, fqn):",
        )
    ],
    "a range of an object begins too early": [
        Mutation(
            "torch_ckpt/filesystems/obstore_client.py",
            "obstore.get_range(store, key, start=offset, length=nbytes)",
            "obstore.get_range(store, key, start=max(offset - 1, 0), length=nbytes)",
        )
    ],
}

OF_TESTS = {
    "a step of another branch is of the lineage": (
        Mutation(
            "torch_ckpt/commits/terms.py",
            "return step <= self.lineage.get(term, -1)",
            "return True",
        ),
        "python/test_lineages.py::"
        "test_jobs_that_share_a_local_directory_replace_and_remove_nothing_of_a_newer_one",
    ),
    "a report does not tell a machine from all ranks": (
        Mutation(
            "torch_ckpt/records/diagnosis.py",
            "    if len(ranks) == len(call.hosts):\n",
            "    if False:\n",
        ),
        "python/test_diagnosis.py",
    ),
    "a state of an optimizer is tied to a weight": (
        Mutation(
            "torch_ckpt/conversion/ties.py",
            "if _OPTIMIZER.search(values.names[each]):",
            "if False:",
        ),
        "python/test_convert_ties.py::test_ties_by_hand_that_cannot_be_are_refused_by_name",
    ),
    "a message may contain an object with a destructor": (
        Mutation(
            "torch_ckpt/_core/unpickling.py",
            'if hasattr(kind, "__del__"):',
            "if False:",
        ),
        "python/test_messages.py::test_values_of_other_classes_are_refused",
    ),
    "a message may contain an object of any imported class": (
        Mutation(
            "torch_ckpt/_core/unpickling.py",
            "if not is_tuple and not dataclasses.is_dataclass(kind):",
            "if False:",
        ),
        "python/test_messages.py::test_values_of_other_classes_are_refused",
    ),
    "the checksum of a message is ignored": (
        Mutation(
            "torch_ckpt/agent/messages.py",
            "if len(body) != nbytes or zlib.crc32(body) != crc:",
            "if len(body) != nbytes:",
        ),
        "python/test_agent_manifests.py::test_no_byte_of_a_file_can_be_changed_or_cut_off_unnoticed",
    ),
    "the version of a message is ignored": (
        Mutation(
            "torch_ckpt/agent/messages.py",
            "if version != _VERSION:",
            "if False:",
        ),
        "python/test_agent_manifests.py::test_a_process_of_another_version_is_named_with_both",
    ),
    "diff exits with the wrong status": (
        Mutation(
            "torch_ckpt/cli/diff.py",
            "DIFFERENT if found.differences else UNKNOWN",
            "UNKNOWN",
        ),
        "python/test_cli_diff.py::test_each_difference_is_named",
    ),
    "ls exits with 0 although a step is damaged": (
        Mutation(
            "torch_ckpt/cli/ls.py",
            'return DAMAGED if any(step["state"] == "damaged" for step in steps) else SOUND',
            "return SOUND",
        ),
        "python/test_cli_ls.py::test_ls_lists_steps_and_marks_damaged_and_unfinished_ones",
    ),
    "a step that is saved again keeps its metrics": (
        Mutation(
            "torch_ckpt/commits/small_files.py",
            "            (step / name).discard()",
            "            pass",
        ),
        "python/test_promotion.py::test_a_step_that_is_saved_again_without_metrics_has_none_in_the_run",
    ),
    "a checkpoint of another format is left beside the target": (
        Mutation(
            "torch_ckpt/conversion/convert.py",
            "if exists and other != to:",
            "if False:",
        ),
        "python/test_convert.py::test_a_checkpoint_of_another_format_is_not_left_beside_the_target",
    ),
    "a URL may have a password": (
        Mutation(
            "torch_ckpt/filesystems/passwords.py",
            '    if ":" in userinfo:\n        return True\n',
            "",
        ),
        "python/test_passwords.py::test_a_url_with_a_password_is_refused_without_repeating_it",
    ),
    "a record of an object may be compressed": (
        Mutation(
            "torch_ckpt/formats/object_pickles.py",
            "        begin, offset = offset, _native.check_archive(stream.read(), end)",
            "        begin, offset = offset, end",
        ),
        "python/test_expansion.py::test_a_compressed_record_of_an_object_is_refused",
    ),
    "getattr of a sharded tensor returns any class": (
        Mutation(
            "torch_ckpt/frameworks/rank_files/sharded_tensors.py",
            'if owner is not ShardedParts or name != "ProcessGroupState":',
            "if False:",
        ),
        "frameworks/rank_files/test_formats_rank_states.py::test_stand_ins_call_nothing",
    ),
    "a shard may have offsets of other dimensions": (
        Mutation(
            "torch_ckpt/frameworks/rank_files/sharded_tensors.py",
            "isinstance(tensor, torch.Tensor) and len(offsets) == tensor.dim()",
            "isinstance(tensor, torch.Tensor)",
        ),
        "frameworks/rank_files/test_formats_rank_states.py::test_damaged_sharded_tensors_are_refused",
    ),
    "a class of a later torch is replaced whatever its arguments": (
        Mutation(
            "torch_ckpt/integrations/replacing.py",
            "return set(inspect.signature(kind).parameters) <= set(arguments)",
            "return True",
        ),
        "python/test_installation.py::test_a_class_with_an_argument_of_a_later_torch_is_left_to_stock",
    ),
    "the end of one block ends the replacement of another": (
        Mutation(
            "torch_ckpt/integrations/replacing.py",
            "is_last = getattr(owner, name) is values[-1]",
            "is_last = False",
        ),
        "python/test_installation.py::test_overlapping_blocks_leave_nothing_replaced",
    ),
    "the worst steps are retained as the best": (
        Mutation(
            "torch_ckpt/ladder/retention.py",
            'sign = 1 if self.mode == "min" else -1',
            "sign = -1",
        ),
        "python/test_best_steps.py::test_the_best_steps_remain_beside_the_newest",
    ),
    "a young step is removed for its age": (
        Mutation(
            "torch_ckpt/ladder/retention.py",
            "if older.get(s, 0.0) < limit)",
            "if older.get(s, 0.0) >= limit)",
        ),
        "python/test_ages_of_steps.py::test_younger_steps_remain_beside_the_newest",
    ),
    "a step of unknown age is removed": (
        Mutation(
            "torch_ckpt/ladder/retention.py",
            "if older.get(s, 0.0) < limit)",
            "if older.get(s, limit) < limit)",
        ),
        "python/test_ages_of_steps.py::test_without_times_of_files_all_steps_remain_with_one_warning",
    ),
    "steps are discarded although the directory of the run is away": (
        Mutation(
            "torch_ckpt/ladder/lineage.py",
            "        self.check_place()\n        self.check_since_restore()\n",
            "        self.check_since_restore()\n",
        ),
        "python/test_moved_runs.py::test_a_run_discards_no_step_while_its_directory_is_not_at_its_path",
    ),
    "a job that has only restored saves to another directory at its path": (
        Mutation(
            "torch_ckpt/ladder/lineage.py",
            "        self._place = self._term or newest\n",
            "",
        ),
        "python/test_moved_runs.py::"
        "test_a_run_saves_nothing_to_another_directory_at_its_path_and_removes_nothing",
    ),
    "an agent writes the last step where the directory of the run was unmounted": (
        Mutation(
            "torch_ckpt/agent/identity.py",
            "        may_be_empty = may_be_empty or target.is_directory()\n",
            "        may_be_empty = True\n",
        ),
        "python/test_last_steps_in_memory.py::"
        "test_close_reports_a_last_step_that_is_in_memory_alone",
    ),
    "a step whose successors were discarded is not promoted again": (
        Mutation(
            "torch_ckpt/ladder/promotion_steps.py",
            "            if not self._of(step).is_in_run and self._of(step).state in _ENDED:\n",
            "            if False:\n",
        ),
        "python/test_promotion.py::"
        "test_a_step_that_newer_ones_had_displaced_in_the_run_is_promoted_again_once_they_are_discarded",
    ),
    "a restore that passes over a damaged step counts as failed": (
        Mutation(
            "torch_ckpt/records/calls.py",
            "            and event.end > planned.get(event.rank, -math.inf)\n",
            "",
        ),
        "python/test_diagnosis.py::test_an_error_in_a_step_that_a_restore_passed_over_is_named_as_such",
    ),
    "a local step of another job counts as unneeded": (
        Mutation(
            "torch_ckpt/ladder/promotion_steps.py",
            "for step in here - self._here:",
            "for step in self._here - here:",
        ),
        "python/test_lineages.py::test_a_step_that_another_job_has_left_in_the_local_directory_is_retained_and_promoted",
    ),
    "a save without a commit is reported as complete": (
        Mutation(
            "torch_ckpt/records/calls.py",
            'return "ok" if self.kind not in DURABLE or self.durable_s is not None else',
            'return "ok" if self.kind else',
        ),
        "python/test_report.py::test_a_save_without_a_commit_is_not_called_ok",
    ),
    "a step is due again right after its save": (
        Mutation(
            "torch_ckpt/runs/save_interval.py",
            " and step != self._attempted",
            "",
        ),
        "python/test_runs.py::test_steps_that_are_multiples_are_to_be_saved_once",
    ),
    "the interval ignores steps that a save slows down": (
        Mutation(
            "torch_ckpt/runs/save_interval.py",
            "cost_s = self.stopped_s + self.slowed_s",
            "cost_s = self.stopped_s",
        ),
        "python/test_runs.py::test_the_interval_allows_for_steps_that_a_background_save_slows_down_and_for_its_length",
    ),
    "a product is rounded towards zero": (
        Mutation("csrc/base/round_float.h", "bits + 0x7fff + ((bits >> 16) & 1)", "bits"),
        "python/test_quantized.py::test_every_dtype_of_numbers_and_scales_gives_the_products_of_torch",
    ),
    "two boxes may have the same elements": (
        Mutation(
            "csrc/geometry/cover.cc",
            "if (box.offsets[d] < end) return",
            "if (false) return",
        ),
        "python/test_cover.py::test_a_load_gives_each_element_the_value_of_its_only_box_or_is_an_error",
    ),
    "any value may be the key of a dict in metadata": (
        Mutation(
            "csrc/bindings/value_stack.cc",
            "if (!key.is_hashable) return",
            "if (false) return",
        ),
        "python/test_hostile_pickles.py::test_what_plain_data_and_records_do_not_need_is_refused",
    ),
    "a transposed tensor has equal matrices": (
        Mutation(
            "csrc/device/cpu_device.cc",
            "copy_transposed(copy, dim + 1, src + i * copy.src_strides[dim],",
            "copy_transposed(copy, dim + 1, src,",
        ),
        "python/test_interchange.py::test_every_dtype_in_every_layout_comes_back_bit_for_bit",
    ),
    "the checksum of a trailer is ignored": (
        Mutation(
            "csrc/format/metadata_trailer.cc",
            "if (record.sum != trailer_sum(last))",
            "if (false)",
        ),
        "python/test_damaged_metadata.py::test_a_damaged_trailer_does_not_make_a_checkpoint_one_without_an_index",
    ),
    "the checksum of a block of the index is ignored": (
        Mutation(
            "csrc/format/checked_blocks.cc",
            "if (xxh3(made.bytes) != sum) {",
            "if (false) {",
        ),
        "python/test_corruption.py::test_no_damage_to_any_region_of_any_file_loads_other_values",
    ),
    "a copy of a file is not checked": (
        Mutation(
            "csrc/io/file_system.cc",
            "    if (check) RETURN_IF_ERROR(check(offset, piece));\n",
            "",
        ),
        "python/test_promotion.py::test_a_damaged_local_step_is_not_promoted",
    ),
    "others may read shared memory": (
        Mutation(
            "csrc/io/shared_memory.cc",
            "constexpr mode_t kOwnerOnly = 0600;",
            "constexpr mode_t kOwnerOnly = 0644;",
        ),
        "python/test_replicas_of_slots.py::test_a_save_arrives_bit_for_bit_with_checksums",
    ),
}
