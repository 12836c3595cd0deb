"""The public interface as data, section by section of the interface page.

Signatures are written as in Python; `...` stands for a required argument. An implementation may
have more parameters, with defaults, after those listed. A name with `_` in front is fixed by its
place only.
"""

from __future__ import annotations

GIB = 1024**3

# Section 1. Module below the package -> names.
SAMPLERS = """CustomSampler SS_Argmax SS_Sample SS_Sample_mn SS_Temperature SS_TopK SS_TopP SS_MinP
    SS_XTC SS_RepP SS_PresFreqP SS_LogitBias SS_BanTokens SS_AdaptiveP SS_Normalize SS_Sort SS_NoOp
    SS_Base xtc_default_protected_token_ids DefaultSampler ArgmaxSampler GreedySampler
    CategoricalSampler GumbelSampler TopKSampler TopPSampler ComboSampler AdaptivePSampler
    Sampler"""
CACHES = """Cache CacheLayer CacheLayer_fp16 CacheLayer_quant CacheLayer_MLA_fp16
    CacheLayer_MLA_quant CacheLayer_dsa RecurrentCache"""
FILTERS = "Filter FormatronFilter LLGuidanceFilter"
EXPORTS = {
    "": f"""Config Model Tokenizer MMEmbedding Cache CacheLayer_fp16 CacheLayer_quant Generator Job
        AsyncGenerator AsyncJob {FILTERS} model_init {SAMPLERS}""",
    "version": "__version__",
    "cache": CACHES,
    "cache.cache": "Cache",
    "generator": f"Generator Job AsyncGenerator AsyncJob {FILTERS}",
    "generator.filter": FILTERS,
    "generator.sampler": SAMPLERS,
    "generator.sampler.custom": f"{SAMPLERS} SS SamplingState",
    "generator.sampler.presets": SAMPLERS,
    "tokenizer": "Tokenizer MMEmbedding",
    "model": "Config Model",
    "model.config": "Config",
    "model.model": "Model",
    "model.lora": "LoRA",
    "model_init": "add_args init get_arg_sampler",
    "loader": "SafetensorsCollection VariantSafetensorsCollection",
    "loader.safetensors": "SafetensorsCollection VariantSafetensorsCollection",
    "constants": "PAGE_SIZE",
    "util": "Timer cuda_sync_active prepend_hf_chat_context",
    "util.misc": "Timer cuda_sync_active prepend_hf_chat_context",
    "util.progress": "ProgressBar",
    "util.file": "disk_lru_cache disk_lru_cache_clear",
    "util.memory": "free_mem",
    "util.measures": "compute_kl_div compute_target_log_probs cosine_error sqnr",
    "integration.transformers": "patch_transformers",
    "modules": "Linear",
    "conversion.convert_model": "parser main prepare",
    "conversion.measure_model": "parser main prepare",
    "conversion.optimize_model": "parser main prepare",
    "compat": "install_alias",
    "errors": """Exl3Error ConfigError FormatError ShapeError SettingsError UnsupportedError
        OutOfMemory CacheFullError""",
}
ERRORS = {
    "ConfigError": "Exl3Error ValueError",
    "FormatError": "Exl3Error ValueError",
    "ShapeError": "Exl3Error ValueError",
    "SettingsError": "Exl3Error ValueError",
    "UnsupportedError": "Exl3Error NotImplementedError",
    "OutOfMemory": "Exl3Error RuntimeError",
    "CacheFullError": "Exl3Error ValueError AssertionError",
}

# Sections 1 to 9 and 12. Name below the package -> its parameters.
JOB = """input_ids=..., max_new_tokens=None, min_new_tokens=0, max_skips=4, sampler=None, seed=None,
    stop_conditions=None, decode_special_tokens=False, return_top_tokens=0, return_logits=False,
    return_probs=False, filters=None, token_healing=False, identifier=None, banned_strings=None,
    embeddings=None, max_rq_tokens=None, stop_on_loop=None, rq_state=None, **kwargs"""
LOAD = """device=None, tp_output_device=None, reserve_per_device=None, use_per_device=None,
    tensor_p=False, progressbar=False, max_chunk_size=2048, max_output_size=32,
    max_output_factor=1, callback=None, generator=True, tp_dev_limits=None, tp_backend="native",
    verbose=False, max_batch_size=1, tp_options=None, autosplit_no_forward=False"""
SIGNATURES = {
    "loader.SafetensorsCollection": "directory=..., load_method=None, tensor_name_fixes=None",
    "loader.VariantSafetensorsCollection": "main=...",
    "loader.VariantSafetensorsCollection.add_stc": "globs=..., collection=...",
    "util.misc.prepend_hf_chat_context": """tokenizer=..., tokens=..., mode="generation",
        prompt="Say something." """,
    "util.progress.ProgressBar": "text=..., count=..., transient=True",
    "util.progress.ProgressBar.update": "value=...",
    "util.progress.ProgressBar.new_task": "text=..., count=...",
    "util.file.disk_lru_cache": "name=...",
    "util.measures.compute_kl_div": "input_logits=..., target_logits=..., vocab_size=...",
    "util.measures.compute_target_log_probs": "logits=..., target_ids=..., vocab_size=...",
    "util.measures.cosine_error": "a=..., b=...",
    "util.measures.sqnr": "a=..., b=...",
    "Config.from_directory": "directory=..., *, layer_map=None, load_method=None",
    "Config.read_cfg": "types=..., keys=..., default=NO_DEFAULT",
    "Config.assert_cfg": "types=..., keys=..., expected=..., optional=False",
    "Config.override_dynamic_seq_len": "_n=...",
    "Model.from_config": 'config=..., component="text", *, swa_full=False, **kwargs',
    "model.load_options.LoadArguments": LOAD,
    "Model.forward": "input_ids=..., params=None",
    "Model.prefill": "input_ids=..., params=None",
    "Model.find_module": "key=...",
    "Model.get_layer_instances": "idx=...",
    "Model.get_layout_tree": "indent=...",
    "Model.default_chat_prompt": "prompt=..., system_prompt=None",
    "Model.get_image_embeddings": "tokenizer=..., image=..., text_alias=None",
    "Cache": """model=..., max_num_tokens=..., layer_type=None, max_batch_size=16, max_history=0,
        **layer_kwargs""",
    "Cache.attach_to_model": "model=None",
    "Cache.detach_from_model": "model=None",
    "Cache.copy_page": "target=..., from_page=..., to_page=..., num_tokens=...",
    "Cache.get_test_state": "position=...",
    "Cache.new_from_stashed": "stash=..., position=...",
    "Cache.release_state": "state=...",
    "Cache.get_recurrent_layer": "key=...",
    "Tokenizer": "config=...",
    "Tokenizer.from_config": "config=...",
    "Tokenizer.encode": """text=..., add_bos=False, add_eos=False, encode_special_tokens=False,
        return_offsets=False, embeddings=None""",
    "Tokenizer.decode": "ids=..., decode_special_tokens=False",
    "Tokenizer.single_id": "text=...",
    "Tokenizer.single_token": "_id=...",
    "Tokenizer.num_tokens": "text=...",
    "Tokenizer.padding_mask": "ids=...",
    "Tokenizer.get_id_to_piece_list": "include_special_tokens=False",
    "Tokenizer.get_tokens_with_prefix_string": "_s=...",
    "Tokenizer.get_tokens_with_prefix_id": "_id=...",
    "Tokenizer.hf_chat_template": """messages=..., add_generation_prompt=True, embeddings=None,
        **template_kwargs""",
    "Tokenizer.hf_render_chat_template": """messages=..., add_generation_prompt=True,
        **template_kwargs""",
    "MMEmbedding": """embeddings=None, token_string=None, text_alias=None,
        deepstack_embeddings=None, grid_thw=None, mrope_merge_size=None, imp=None""",
    "Generator": f"""model=..., cache=..., tokenizer=..., max_batch_size=256, max_chunk_size=2048,
        max_q_size=8, draft_model=None, draft_cache=None, num_draft_tokens=None,
        show_visualizer=False, enable_defrag=True, cpu_cache_size=0,
        recurrent_cache_size={4 * GIB}, recurrent_checkpoint_interval=None,
        recurrent_checkpoint_interval_pp=32768, ngram_match_min=0, dynamic_draft_tokens=False,
        dynamic_draft_alpha_up=1.30, dynamic_draft_alpha_down=0.65, dynamic_draft_skip_ema=0.3,
        dynamic_draft_probe_interval=16, record_draft_stats=False, **kwargs""",
    "Generator.enqueue": "job=...",
    "Generator.iterate": "",
    "Generator.cancel": "job=...",
    "Generator.clear_queue": "",
    "Generator.num_remaining_jobs": "",
    "Generator.num_active_jobs": "",
    "Generator.num_pending_jobs": "",
    "Generator.generate": """prompt=..., max_new_tokens=None, min_new_tokens=0, seed=None,
        sampler=None, token_healing=False, encode_special_tokens=False,
        decode_special_tokens=False, stop_conditions=None, add_bos=False, abort_event=None,
        completion_only=False, filters=None, return_last_results=False, embeddings=None,
        max_rq_tokens=None, stop_on_loop=None, **kwargs""",
    "Job": JOB,
    "Job.constrain_output_now": "ids=...",
    "AsyncGenerator": "*args, **kwargs",
    "AsyncGenerator.enqueue": "async_job=...",
    "AsyncGenerator.cancel": "async_job=...",
    "AsyncGenerator.close": "",
    "AsyncJob": "generator=..., *args, **kwargs",
    "AsyncJob.cancel": "",
    "AsyncJob.constrain_output_now": "ids=...",
    "Sampler.forward": """logits=..., sequence_ids=None, rand_u32=None, tokenizer=None,
        logit_mask=None, return_state=False""",
    "CustomSampler": "steps=...",
    "CustomSampler.forward": """logits=..., sequence_ids=None, rand_u32=None, tokenizer=None,
        logit_mask=None, return_state=False""",
    "SS_Argmax": "",
    "SS_Sample": "",
    "SS_Sample_mn": "",
    "SS_Temperature": "temperature=...",
    "SS_TopK": "top_k=...",
    "SS_TopP": "top_p=...",
    "SS_MinP": "min_p=...",
    "SS_XTC": "probability=..., threshold=..., protected_token_ids=None, tokenizer=None",
    "SS_RepP": f"rep_p=1.0, sustain_range={10**8}, decay_range=0",
    "SS_PresFreqP": f"pres_p=0.0, freq_p=0.0, sustain_range={10**8}, decay_range=0",
    "SS_LogitBias": "logit_bias=...",
    "SS_BanTokens": "token_ids=...",
    "SS_AdaptiveP": "target=1.0, decay=0.0",
    "SS_Base.run": "state=...",
    "SS_Base.prep": "in_state=...",
    "SS_Base.alt": "",
    "SS_Base.reqs_past_ids": "",
    "SS_Base.reqs_torch_seed": "",
    "DefaultSampler": "",
    "ArgmaxSampler": "",
    "CategoricalSampler": "temperature=1.0",
    "TopKSampler": "top_k=..., temperature=1.0",
    "TopPSampler": "top_p=..., temperature=1.0, temperature_last=False",
    "ComboSampler": f"""rep_p=1.0, freq_p=0.0, pres_p=0.0, rep_sustain_range={10**8},
        rep_decay_range=0, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, temp_last=False,
        adaptive_target=1.0, adaptive_decay=0.9, logit_bias=None""",
    "AdaptivePSampler": "min_p=0.08, target=0.5, decay=0.9",
    "generator.sampler.xtc_default_protected_token_ids": "tokenizer=...",
    "Filter.attach": "job=...",
    "Filter.reset": "",
    "Filter.accept_token": "token=...",
    "Filter.get_next_logit_mask": "",
    "Filter.is_completed": "",
    "Filter.use_background_worker": "",
    "Filter.feed": "token=...",
    "Filter.rewind": "count=...",
    "Filter.rollback_tokens": "count=...",
    "LLGuidanceFilter": """tokenizer=..., trigger_token=None, prefix_str=None,
        eos_after_completed=False, json_schema=None, regex=None, lark_grammar=None,
        gbnf_grammar=None, llg_grammar=None, consume_prefix=False""",
    "LLGuidanceFilter.get_captures": "",
    "FormatronFilter": """tokenizer=..., trigger_token=None, prefix_str=None,
        eos_after_completed=False, formatter_builder=None, engine_config=None,
        vocab_processors=None""",
    "model.lora.LoRA.from_directory": "model=..., directory=..., lora_scaling=1.0",
    "model.lora.LoRA.unload": "",
    "model_init.add_args": """parser=..., cache=True, default_cache_size=8192,
        default_recurrent_cache_size=4.0, default_cpu_cache_size=0.0, add_sampling_args=False,
        default_sampling_args=None, default_autosplit_max_batch_size=1,
        add_draft_model_args=False""",
    "model_init.init": """args=..., load_tokenizer=True, quiet=False, progress=True,
        override_dynamic_seq_len=None, min_draft_len=None, **load_kwargs""",
    "model_init.get_arg_sampler": "args=...",
    "conversion.convert_model.prepare": "args=...",
    "conversion.convert_model.main": "in_args=..., job_state=...",
    "integration.transformers.patch_transformers": "",
    "compat.install_alias": "",
}

# Attributes and methods of objects on a loaded tiny model.
ATTRIBUTES = {
    "config": """directory config_filename config_dict architecture arch_string model_classes
        bos_token_id pad_token_id eos_token_id eos_token_id_list vocab_size max_position_embeddings
        num_hidden_layers head_dim num_q_heads num_kv_heads hidden_size intermediate_size
        tie_word_embeddings rope_settings vision vision_pp image_token_id stc infer_params layer_map
        layer_map_str uuid g_rope pos_encoding_mode initializer_range load_isq read_cfg assert_cfg
        override_dynamic_seq_len""",
    "config.stc": "metrics",
    "config.infer_params": """moe_cpu_offload draft_moe_cpu_offload moe_cpu_threads
        draft_moe_cpu_threads moe_cpu_offload_assigned no_reconstruct mgemm_K_threshold
        mgemm_n_threshold""",
    "model": """config modules caps component active_devices output_device loaded_tp
        tp_output_device loaded logit_layer_idx first_block_idx last_kv_module_idx
        draft_verifier_params cache_weakrefs find_module get_cache_layers get_recurrent_layers
        get_layer_instances get_layout_tree get_storage_info get_name get_load_metrics
        default_chat_prompt load load_gen unload forward prefill __iter__""",
    "cache": """model config max_num_tokens layer_type num_layers layers recurrent_layers num_slots
        max_history free_list recurrent_state_cls attach_to_model detach_from_model copy_page
        get_all_tensors get_layer update_layer update_layer_direct get_new_state get_test_state
        new_from_stashed release_state get_recurrent_layer get_all_recurrent_layers""",
    "cache.layers[0]": """alloc free get_kv update_kv update_kv_direct copy_page get_tensors
        storage_size overhead_size tp_export""",
    "tokenizer": """bos_token_id eos_token_id pad_token_id unk_token_id bos_token eos_token
        unk_token pad_token newline_token newline_token_id space_token space_token_id raw_vocab_size
        actual_vocab_size extended_piece_to_id extended_id_to_piece tokenizer config
        tokenizer_config_dict generation_config_dict id_to_piece get_piece_to_id_dict
        get_vocab_dict get_id_to_ord_list get_fixed_vocab""",
    "embedding": """metadata full_length mm_length first_index last_index text_alias token_string
        token_list embeddings deepstack_embeddings grid_thw mrope_merge_size""",
    "generator": """max_batch_size max_chunk_size max_total_tokens padded_vocab_size
        num_draft_tokens pending_jobs active_jobs pagetable recurrent_cache
        recurrent_checkpoint_interval cpu_page_cache""",
    "generator.pagetable": "metrics max_pages dump_page_list",
    "job": """serial_number identifier sequences new_tokens full_completion is_finished cached_pages
        cached_tokens total_pages non_sequential_pages accepted_draft_tokens rejected_draft_tokens
        draft_stats time_enqueued time_prefill time_generate is_prefill_done
        constrain_output_now""",
    "job.sequences[0].input_ids": "torch",
    "sampler": "forward reqs_past_ids reqs_torch_seed",
    "state": """state rand_u32 bsz dim in_logits logits sample probs indices past_ids""",
    "filter": """tokenizer trigger_token prefix_str eos_after_completed is_active vocab_size
        logits_dtype""",
}
SS_STATES = "INIT LOGITS LOGITS_S PROBS PROBS_S PROBS_N PROBS_N_S DONE"

# Section 6.3. Keys of events beyond `job stage eos serial` (and `identifier`).
EVENT_KEYS = {
    "started": "",
    "prefill": "curr_progress max_progress",
    "streaming": "text token_ids token_probs top_k_tokens top_k_probs logits",
    "eos": """eos_reason full_completion new_tokens prompt_tokens time_enqueued time_prefill
        time_generate cached_pages cached_tokens""",
    "stop_token": "eos_triggering_token_id eos_triggering_token_str held",
    "stop_string": "eos_triggering_string held",
    "max_new_tokens": "",
    "end_filter": "",
    "loop_detected": "",
    "banned": "suppressed_text suppressed_tokens",
}

# Section 10. Flags -> type, default; type None: a switch.
MODEL_FLAGS = {
    "-m --model_dir": (str, None),
    "-gs --gpu_split": (str, None),
    "-lm --load_metrics": (None, False),
    "-lv --load_verbose": (None, False),
    "-asnf --autosplit_no_forward": (None, False),
    "-swa_full --swa_full": (None, False),
    "-or --override": (str, None),
    "-tp --tensor_parallel": (None, False),
    "-tpb --tp_backend": (str, "native"),
    **{f"-tp_{x} --tp_max_parallelism_{x}": (int, None)
       for x in ("attn", "mlp", "moe", "linear", "linear_attn")},
    "-tp_moe_ts --tp_moe_tensor_split": (None, False),
    "-mcl --moe_cpu_offload": (int, 0),
    "-mclt --moe_cpu_threads": (int, None),
    "-ambs --autosplit_max_batch_size": (int, 1),
    "-layer_map --layer_map": (str, None),
    "-cs --cache_size": (int, 8192),
    "-cq --cache_quant": (str, None),
    "-cca --cache_compand_a": (float, 0.0),
    "-ccs --cpu_cache_size": (float, 0.0),
    "-rcs --recurrent_cache_size": (float, 4.0),
    "-temp --temperature": (float, 0.8),
    "-temp_first --temperature_first": (None, False),
    "-repp --repetition_penalty": (float, 1.0),
    "-presp --presence_penalty": (float, 0.0),
    "-freqp --frequency_penalty": (float, 0.0),
    "-penr --penalty_range": (int, 1024),
    "-minp --min_p": (float, 0.08),
    "-topk --top_k": (int, 0),
    "-topp --top_p": (float, 1.0),
    "-adaptive_target --adaptive_target": (float, 1.0),
    "-adaptive_decay --adaptive_decay": (float, 0.9),
    "-dm --draft_model_dir": (str, None),
    "-ndt --num_draft_tokens": (int, None),
    "-mtp --mtp": (None, False),
    "-ngram --ngram_match_min": (int, 0),
    "-dds --dynamic_draft": (None, False),
    "-dskip --draft_skip_ema": (float, 0.3),
    "-dmcl --draft_moe_cpu_layers": (int, 0),
    "-dmclt --draft_moe_cpu_threads": (int, None),
}  # fmt: skip

# Section 11.1. A default of None is filled in later, see the conversion tests.
CONVERT_FLAGS = """-i --in_dir,-o --out_dir,-w --work_dir,-b --bits,-hb --head_bits,-mb --mtp_bits,
    -hq --hq,-cr --cal_rows,-cc --cal_cols,-cb --codebook,--out_scales,-ss --shard_size,
    -cpi --checkpoint_interval,-lcpi --last_checkpoint_index,-d --devices,-dr --device_ratios,
    -r --resume,--override_anyway,-v --verbose,-img --image_dump,--max_module,-pm --parallel_mode"""
CONVERT_DEFAULTS = {
    "head_bits": 6, "mtp_bits": 4, "hq": False, "cal_rows": 250, "cal_cols": 2048,
    "codebook": "mul1", "out_scales": "always", "shard_size": 8192, "checkpoint_interval": 120,
    "last_checkpoint_index": -1,
}  # fmt: skip

# Section 11.2.
CHAT_FLAGS = {
    "-mode --mode": None,
    "-modes --modes": False,
    "-un --user_name": "User",
    "-bn --bot_name": "Assistant",
    "-sp --system_prompt": None,
    "-mli --multiline": False,
    "-basic --basic_console": False,
    "-maxr --max_response_tokens": 5000,
    "-think --think": False,
    "-no_think --no_think": False,
    "-think_budget --think_budget": 0,
    "-amnesia --amnesia": False,
    "-tps --show_tps": False,
    "-probs --probs": 0,
    "-prompt --prompt": None,
    "-save --save": None,
    "-save_svg --save_svg": None,
    "-lw --loop_window": 300,
    "-lmr --loop_min_reps": 3,
    "-ups --updates-per-second": 30,
    "-dbg --debug": False,
    "-vis --visualize_cache": False,
    "-cs --cache_size": 32768,
}
CHAT_MODES = """auto raw llama3 chatml qwen35 phi mistral mistral3 gemma gemma4 glm reka dots ernie
    exaone seed apertus minimax gptoss hy3 laguna kimi deepseek ds4 cohere commanda smollm3"""
CHAT_COMMANDS = """h x clear r e sp ban think tps mli probs t n save load save_ids cc svg python b
    nihs cat gm ppt"""

# Section 12. Settings of E3 that an old shell profile may hold.
SETTINGS = """EXL3_MOE_CPU_OFFLOAD EXL3_MOE_CPU_THREADS EXL3_MOE_CPU_MAX_ISA EXL3_MOE_CPU_PIN
    EXLLAMAV3_TUNE_CACHE EXLLAMA_NO_P2P_COPY EXLLAMA_MASTER_ADDR EXLLAMA_MASTER_PORT
    EXL3_QC_STAGING EXL3_INT8_GEMV EXL3_FUSED_SAMPLER"""

# What the page names and this version has not. A test fails when one of them appears, so that its
# line is taken out.
ABSENT: set[str] = set()
