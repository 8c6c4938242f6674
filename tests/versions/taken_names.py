"""Names of other libraries that drumline takes: why each is taken, and where it was read.

TAKEN["drumline/contact/loading/hub.py"]["snapshot_download"]  # "the files of a model, ..."

By module that takes them. Tests compare these with what the modules import; before a new release of
a library is allowed, its source is read against them.
"""

from __future__ import annotations

from drumline.contact.releases import READ

TORCH = {
    # Tensors.
    "_subclasses": "the fake tensors of tracing, which have no memory to move",
    "_functorch": "tensors inside of vmap and grad, which are wrappers",
    "_disabled_torch_function_impl": "what a subclass says to have no __torch_function__",
    "_make_wrapper_subclass": "a tensor of a shape and without memory",
    "_version": "whether a tensor was written into between a call and the message with it",
    "_current_level": "whether forward-mode derivatives are asked for, which no_grad leaves on",
    "_parse_to": "how torch reads the arguments of .to(), for the devices of others too",
    "_nn": "where _parse_to is",
    "_spec": "layout of a DTensor, which from_local would compute anew",
    # Operators.
    "_AutoDispatchBelowAutograd": "an operator of ours that autograd must not see",
    "_ops": "kinds of operators, to tell them from functions in a traced program",
    "_schema": "which arguments of an operator are devices, and whether it writes",
    "_python_dispatch": "a mode that sees every operator; it is documented there",
    "_get_current_dispatch_mode_stack": "whether such a mode of ours is on already",
    "_get_current_function_mode_stack": "whether functions are somebody else's in a context",
    "_device": "where the context of torch.device() is, in which they are torch's own",
    "_pytree": "trees of torch.export and fx, whose kinds of nodes are registered there",
    "_enter_autocast": "name of the call in a traced program, which has a device type",
    "_grouped_mm": "what experts call, also by its public name; that one alone where it is gone",
    "_linear_pointwise": "a product by oneDNN, that of a layer elsewhere where it is gone",
    # Modules.
    "_parameters": "a module's own parameters, and those that are None",
    "_buffers": "a module's own buffers, and those that are None",
    "_modules": "whether a module has places for children",
    "_non_persistent_buffers_set": "buffers that no checkpoint has",
    "_forward_hooks": "whether a script watches a module",
    "_forward_pre_hooks": "whether a script watches a module",
    "_apply": "the one method by which modules are moved and converted",
    # torch.compile.
    "_initialize_hook": "what torch.compile(model) asks a model for, before it traces",
    "_torchdynamo_orig_callable": "the mark of a function that is compiled",
    "_dynamo": "torch.compiler.disable imports the compiler, which takes seconds",
    "_FrameAction": "as _dynamo; where it is missing, nothing is skipped",
    "_FrameExecStrategy": "as _dynamo; where it is missing, nothing is skipped",
    "_inductor": "AOTInductor, documented by these names",
    "_aoti": "aoti_load_package asks a compiler what this CPU can do",
    "_internal": "the store of a process group whose other ranks do not exist",
    # torch.distributed.
    "_Options": "a gloo group at an address of ours, with one thread",
    "_devices": "as _Options",
    "_threads": "as _Options",
    "_timeout": "as _Options, and the time limit that torch passes to a backend",
    "_allgather_base": "gloo's allgather into one tensor",
    "_get_process_group_store": "where ranks of a group that torch made meet",
    "_device_types": "the devices of a group, to find the backend of each",
    "_get_backend": "a group's backend object, which has no public getter",
    "_set_group_name": "torch calls it on a group that Python made",
    "_set_group_desc": "torch calls it on a group that Python made",
    "_C": "torch's own C++ module, where some of these names are",
}
"""Private names: as an attribute, by import or as text."""

TRANSFORMERS = {
    "AutoConfig": "the config of a checkpoint, also one with code of its own",
    "AutoProcessor": "what makes inputs of images for a model that is served",
    "AutoTokenizer": "the tokenizer of a checkpoint or of a GGUF file",
    "CONFIG_MAPPING": "the kind of a config whose fields came from another rank",
    "Cache": "the kind of the value in a pass that is its cache, whatever its key",
    "DynamicCache": "the cache that grows, built again on other ranks",
    "EncoderDecoderCache": "a pair of caches, which other ranks get as two",
    "EosTokenCriteria": "a stop that depends on tokens alone, the same on each rank",
    "GenerationConfig": "the generation settings of a checkpoint and of the server",
    "LoadStateDictInfo": "reports what a checkpoint lacks, where drumline reads it",
    "MODEL_FOR_CAUSAL_LM_MAPPING": "the class of a config that names none: a decoder",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING": "the same of one that takes images or sound",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": "the same of encoder and decoder",
    "MODEL_MAPPING": "the same of any other model, without a head",
    "MaxLengthCriteria": "a stop that depends on tokens alone, the same on each rank",
    "ModelOutput": "outputs that are built again from their parts",
    "PreTrainedConfig": (
        "tells a config from a path, and tiny ones for caches on which kinds of layers are tried"
    ),
    "PreTrainedModel": "its from_pretrained, and which classes and modules are models",
    "QuantizedCache": "the cache of which only some tokens are as they were put in",
    "StaticCache": "the cache of fixed size, built again on other ranks",
    "StopStringCriteria": "a stop that depends on tokens alone, the same on each rank",
    "StoppingCriteria": "a stop of our own: each rank stops when the first does",
    "TENSOR_PROCESSORS": "lay weights of a GGUF file out as a model has them",
    "TensorProcessor": "the one for architectures of GGUF without one of their own",
    "dynamic_module_utils": (
        "the class that a checkpoint's own code defines; its constant TIME_OUT_REMOTE_CODE is set "
        "to 0 while models are built, for a rank must not ask on stdin, and nothing else turns "
        "the question off for a config within a config"
    ),
    "get_gguf_hf_weights_map": "the names of a GGUF file's tensors in a model",
    "get_response_template": (
        "tells calls and reasoning apart in answers of models whose tokenizers do not say how; of "
        "the private server of transformers, as nothing public has these templates"
    ),
    "get_hf_quantizer": "the sizes that quantized weights will have in memory",
    "get_model_conversion_mapping": (
        "the tables by which stored weights are renamed, stacked and joined for a kind of model"
    ),
    "rename_source_key": "applies these tables to one stored key",
}
"""Names that are imported, or taken as attributes."""

UNDERSCORES = {
    "_apply_gate": "what a stack of experts does between its two products, by family",
    "_attn_implementation": (
        "the attention of a config, which ranks must share; the public setter has no getter"
    ),
    "_ep_plan": "a model's plan for experts; its config has it without a prefix",
    "_experts_implementation": (
        "how experts are run; the public getter is of models, and a module of experts is none"
    ),
    "_from_config": (
        "builds a class that is known by name, as AutoModel.from_config does for its own choice"
    ),
    "_from_model_config": "reads generation settings out of an older config.json",
    "_get_dtype_plan": "the tensors that a model keeps in float32",
    "_get_stopping_criteria": (
        "all stops of a generation, overridden: an argument of generate() only adds one"
    ),
    "_is_expert_parallel": "tells experts that they are some of all",
    "_is_hf_initialized": (
        "marks weights that are read later, for which numbers would be drawn first: to skip each "
        "initializer instead tripled the time that an empty model takes"
    ),
    "_load_pretrained_model": (
        "what reads, in from_pretrained: given its device map, it would hook every module and "
        "quantizers would refuse it, as modules of other ranks are on meta"
    ),
    "_no_split_modules": "classes whose modules stay on one device, as accelerate reads",
    "_postprocess_outputs": (
        "overridden: Whisper copies each cache into its result, and some layers are elsewhere"
    ),
    "_tp_plan": "a model's plan for sharded layers; its config has it without a prefix",
    "_valid_auto_compile_criteria": (
        "overridden: a generation's own settings would come before a default of disable_compile"
    ),
}
"""Attributes, methods and arguments of transformers with an underscore that no public one
replaces."""

BATCHING_NAMES = {
    "AttentionInterface": "where attention over pages is registered by name",
    "AttentionMaskInterface": "the masks of ordinary passes under that name",
    "ContinuousBatchProcessor": "schedules and samples, over the tables of rank 0",
    "ContinuousBatchingConfig": "the settings of a script that passes none",
    "ContinuousBatchingManager": "what a script adds requests to, and gets results from",
    "MinPLogitsWarper": "leaves out tokens by the most likely one",
    "PagedAttentionCache": "the tables of blocks, kept on rank 0 without a pool",
    "SCHEDULER_MAPPING": "the scheduler that the settings name",
    "TopKLogitsWarper": "leaves out all but some tokens",
    "TopPLogitsWarper": "leaves out tokens behind a sum of probabilities",
    "eager_mask": "the masks of ordinary passes beside eager attention",
    "eager_paged_attention_forward": "eager attention of one sequence, with sinks",
    "group_layers_by_attn_type": "the layers of each kind of attention",
    "sdpa_attention_forward": "attention of one sequence by torch's own kernels",
    "sdpa_mask": "the masks of ordinary passes beside torch's kernels",
    "update_cb_config_after_cache_creation": "tells the settings how many blocks",
}
"""Names that continuous batching takes, see transformers_api.continuous_batching()."""

BATCHING_UNDERSCORES = {
    "_can_set_attn_implementation": (
        "whether a model's attention is called by name; setting it otherwise only logs a warning"
    ),
    "_cached_continuous_batching_manager": "the manager that is kept for a next batch",
    "_create_batch_processor": "makes the cache, which takes 0.6 of a host's memory",
    "_generation_step": "hands the model each step's arguments",
    "_run_generation_loop": "the thread, at whose end the attention is given back",
    "_schedule_request": "gives a prompt its tokens of a step, the first one all of them",
    "_supports_logits_to_keep": "whether a model computes only the logits of last tokens",
    "_use_prefix_sharing": "sorts the prompts of a batch by their beginnings",
    "block_physical_stride": "the distance of blocks in the numbers of tokens",
    "sentinel_index": "the number in a window's list that stands for a new token",
    "write_trash_index": "the number of a token that is not kept",
}
"""Attributes of continuous batching that are private, or read and set by us."""

ACCELERATE = {
    "get_max_memory": "bytes free by device of one process, with its signature",
    "get_balanced_memory": "as get_max_memory, for an even spread",
    "infer_auto_device_map": "the device map of one process, with its signature",
    "dispatch_model": "a model spread over the devices of one process",
    "load_checkpoint_and_dispatch": "as dispatch_model, with the weights of a file",
}

UVICORN = {
    "Config": "how to listen, and by which class of connections",
    "Server": "what runs the application; run, should_exit and handle_exit are used",
    "capture_signals": "replaced: uvicorn's own raises the signal again, after its end",
    "H11Protocol": "a connection, of which ours is a subclass",
    "conn": "the h11 connection of it, which reads and writes HTTP",
    "connections": "all that are open, to count them",
    "cycle": "the request that is answered: response_complete, disconnected",
    "flow": "write_paused: a client that does not take its answer",
    "transport": "abort, which closes at once",
    "loop": "call_later, for deadlines",
    "on_response_complete": "overridden: the next request begins",
    "send_400_response": "overridden: nothing may follow an answer that has begun",
    "h11": "states of both sides, and the events of a request: all documented",
}

SAFETENSORS = {
    "safe_open": "tensors that transformers reads one by one",
    "load": "tensors that came as bytes from another rank",
    "save": "tensors as bytes, for other ranks",
    "save_file": "weights that are offloaded to disk",
}

HUB = {
    "snapshot_download": "the files of a model, kept in its cache",
    "HfApi": "headers of files of weights that are not here, for plans",
    "DryRunError": "told apart: the Hub cannot be asked which files are not here",
}

TAKEN = {
    "coordinator/torch_private.py": TORCH,
    "drumline/contact/transformers_api.py": {**TRANSFORMERS, **BATCHING_NAMES},
    "drumline/contact/accelerate_api.py": ACCELERATE,
    "drumline/contact/uvicorn_api.py": UVICORN,
    "drumline/contact/safetensors_api.py": SAFETENSORS,
    "drumline/contact/loading/hub.py": HUB,
}

RELEASES = {
    "torch": ("2.11.0", "2.13.0", "2.14.1", "2.15.0"),  # of what only C++ has: run, but not 2.14.1
    **READ,
    "uvicorn": ("0.34.0", "0.54.0"),
    "h11": ("0.14.0", "0.16.0"),
    "huggingface_hub": ("2.4.0",),
}
"""By library, the releases in whose source its names were read."""
