"""Every kind of finding there is. docs/cli.md has the same list: a test compares.

Names in braces are filled in with what was found. Braces that stay are doubled.
"""

from __future__ import annotations

from forebay.cli.findings import Kind, Severity

OK, NOTE, WARNING, ERROR = Severity

# --- what is installed --------------------------------------------------------------------------------

PYTHON = Kind("python", OK, "Python {version}", "Forebay needs 3.11 or newer.")
PYTHON_OLD = Kind(
    "python-old",
    ERROR,
    "Python {version} is older than 3.11",
    "Forebay does not run on it.",
    "python3.12 -m venv .venv",
)
VLLM = Kind("vllm", OK, "vLLM {version}", "The connector runs inside vLLM.")
VLLM_MISSING = Kind(
    "vllm-missing",
    ERROR,
    "vLLM is not installed in this Python",
    "The connector runs inside vLLM: Forebay has to be installed where vLLM is.",
    'pip install "vllm=={newest}.*"',
)
VLLM_OLD = Kind(
    "vllm-old",
    WARNING,
    "vLLM {version} is older than {oldest}",
    "Forebay was not written for it. It may stop at start.",
    'pip install "vllm=={newest}.*"',
)
VLLM_UNTESTED = Kind(
    "vllm-untested",
    WARNING,
    "vLLM {version} is not one that was tested ({oldest} to {newest})",
    "It is tried all the same, but nobody knows yet whether all is well.",
    'pip install "vllm=={newest}.*"',
)
TORCH = Kind("torch", OK, "torch {version}, built for {target}", "Copies run on what torch was built for.")
TORCH_MISSING = Kind(
    "torch-missing", ERROR, "torch is not installed in this Python", "vLLM needs it.", "pip install torch"
)
TORCH_ROCM = Kind(
    "torch-rocm",
    ERROR,
    "torch {version} is built for ROCm",
    "Forebay copies on CPUs and on NVIDIA GPUs only: the engine stops at start.",
    "pip install torch",
)
TORCH_CPU = Kind(
    "torch-cpu",
    WARNING,
    "torch {version} is built for CPUs, and this machine has a GPU",
    "The engine runs on the CPU, and the GPU is left alone.",
    "pip install --force-reinstall vllm torch",
)

# --- the GPU ------------------------------------------------------------------------------------------

GPU = Kind("gpu", OK, "GPUs: {count}, driver for CUDA {version}", "Blocks are copied between them and the host.")
GPU_NONE = Kind("gpu-none", OK, "no GPU, and none is needed", "A vLLM for CPUs does without.")
GPU_MISSING = Kind(
    "gpu-missing",
    ERROR,
    "torch is built for CUDA, but no GPU is visible: {reason}",
    "The engine does not start. A container sees GPUs only if it is given them.",
    "docker run --gpus all ...",
)
DRIVER_OLD = Kind(
    "driver-old",
    WARNING,
    "the driver, for CUDA {version}, has no batched copies (cuMemcpyBatchAsync)",
    "Blocks are copied with a call each, which takes longer. Driver 570 is the first that has them.",
    "sudo apt install nvidia-driver-570    # or as your system has it",
)
TRITON = Kind("triton", OK, "Triton can be imported", "The copies of small pieces are kernels in Triton.")
TRITON_MISSING = Kind(
    "triton-missing",
    ERROR,
    "Triton cannot be imported: {reason}",
    "Copies on a GPU need it: the engine stops at start.",
    "pip install triton",
)
MEMLOCK = Kind(
    "memlock", OK, "locked memory: {limit}", "Host memory is pinned, so that a GPU copies it at full speed."
)
MEMLOCK_LOW = Kind(
    "memlock-low",
    NOTE,
    "only {limit} of memory may be locked, and {asked} are asked for",
    'Most drivers pin more all the same. If yours does not, the log says "not pinned" and copies are slow.',
    "ulimit -l unlimited    # or: docker run --ulimit memlock=-1 ...",
)

# --- memory -------------------------------------------------------------------------------------------

MEMORY = Kind("memory", OK, "{available} of memory are left, {asked} asked for", "Blocks are kept in it.")
MEMORY_UNKNOWN = Kind(
    "memory-unknown",
    NOTE,
    "how much memory there is could not be read",
    "Nobody stops the host pool before the machine has none left.",
    "grep Mem /proc/meminfo",
)
MEMORY_TOO_LARGE = Kind(
    "memory-too-large",
    ERROR,
    "{asked} are asked for, and {limit} has {total}",
    "The engine would be killed for want of memory, or its host pool stay much smaller than it was planned.",
    "forebay config --memory {fits}",
)
MEMORY_SHORT = Kind(
    "memory-short",
    WARNING,
    "{asked} are asked for, and {limit} has {available} left, of which {reserve} are kept for others",
    "On a GPU engine the host pool stops growing there. A CPU engine may be killed.",
    "forebay config --memory {fits}",
)
MEMORY_UNDER_BLOCK = Kind(
    "memory-under-block",
    ERROR,
    "{asked} on each rank is less than a block, which takes {block}",
    "Nothing can be kept: the engine stops at start.",
    "forebay config --memory 8GiB",
)
CONTAINER_LIMIT = Kind(
    "container-limit",
    NOTE,
    "the container may use {limit} of the machine's {machine}",
    "The smaller number counts: who goes beyond it is killed. A share in percent is a share of it.",
    "forebay config --memory 50%",
)
HUGE_PAGES = Kind("huge-pages", OK, "huge pages: {setting}", "They make large memory faster to touch and to pin.")
HUGE_PAGES_OFF = Kind(
    "huge-pages-off",
    WARNING,
    "transparent huge pages are set to never",
    "Host memory comes in small pages, so it takes longer until all of it can be used.",
    "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
)
OVERCOMMIT_STRICT = Kind(
    "overcommit-strict",
    WARNING,
    "vm.overcommit_memory is 2, which leaves {left} to be promised",
    "The kernel refuses memory that is reserved and not used yet. Engines reserve far more than they use.",
    "sudo sysctl vm.overcommit_memory=0",
)
NUMA = Kind("numa", OK, "{how_many_nodes_and_which_have_gpus}", "Memory next to the GPU is copied faster.")
NUMA_UNKNOWN = Kind(
    "numa-unknown",
    WARNING,
    "this machine has {nodes} NUMA nodes, and the GPU does not say which is its own",
    "Host memory may come from the far node. Copies then cross from one processor to the other.",
    "nvidia-smi topo -m    # then: numactl --preferred=NODE vllm serve ...",
)
NUMA_SMALL = Kind(
    "numa-small",
    NOTE,
    "NUMA node {node} has {total}, and its GPUs are to use {asked}",
    "The rest comes from other nodes, and is copied more slowly.",
    "forebay config --memory {fits}",
)
SHM_IN_USE = Kind(
    "shm-in-use",
    NOTE,
    "{name} in /dev/shm, {size}, is in use",
    "Another engine keeps its host cache there. It takes memory that is then not left for this one.",
)
SHM_LEFTOVER = Kind(
    "shm-leftover",
    WARNING,
    "{name} in /dev/shm, {size}, is used by no process that can be seen here",
    "An engine that is gone has left its host cache. It takes memory until it is removed.",
    "rm /dev/shm/{name}",
)

# --- settings -----------------------------------------------------------------------------------------

CONFIG = Kind("config", OK, "the configuration is right", "It was checked as an engine checks it at its start.")
CONFIG_UNREADABLE = Kind(
    "config-unreadable",
    ERROR,
    "{why_it_cannot_be_read}",
    "vLLM cannot read it either.",
    "forebay config --memory 64GB",
)
CONNECTOR_NONE = Kind(
    "connector-none",
    ERROR,
    "there is no kv_transfer_config",
    "Without a connector nothing is offloaded.",
    '--kv-transfer-config "$(forebay config --memory 64GB)"',
)
CONNECTOR_OTHER = Kind(
    "connector-other",
    ERROR,
    "kv_connector: expected {expected!r}, got {got}",
    "vLLM looks for a class of this name, and runs another connector or none.",
    '"kv_connector": "{expected}"',
)
MODULE_PATH = Kind(
    "module-path",
    ERROR,
    "kv_connector_module_path: expected {expected!r}, got {got}",
    "Without it vLLM runs its own connector of the same name, and Forebay is not used.",
    '"kv_connector_module_path": "{expected}"',
)
ROLE_WRONG = Kind(
    "role-wrong",
    ERROR,
    "kv_role: expected 'kv_both' or 'kv_producer', got {got}",
    "vLLM refuses it, and does not start.",
    '"kv_role": "kv_both"',
)
ROLE_ONE_SIDED = Kind(
    "role-one-sided",
    WARNING,
    "kv_role: expected 'kv_both' or 'kv_producer', got {got}",
    "Forebay stores and loads in one engine. vLLM plans for an engine that only loads.",
    '"kv_role": "kv_both"',
)
FAILURE_POLICY = Kind(
    "failure-policy",
    WARNING,
    "kv_load_failure_policy: expected 'recompute', got {got}",
    "A request whose load fails ends with an error. With 'recompute' it computes instead.",
    '"kv_load_failure_policy": "recompute"',
)
UNKNOWN_KEY = Kind(
    "unknown-key",
    ERROR,
    "{the_key_and_the_nearest_right_one}",
    "A misspelt setting has no effect, so it is refused.",
    "{the_right_key}",
)
WRONG_VALUE = Kind(
    "wrong-value",
    ERROR,
    "{what_was_expected_and_what_came}",
    "The engine stops at start with this line.",
    "{a_right_value}",
)
PREFIX_CACHING_OFF = Kind(
    "prefix-caching-off",
    ERROR,
    "prefix caching is off",
    "Blocks then have no keys: nothing is stored and nothing is found.",
    "vllm serve MODEL --enable-prefix-caching ...",
)
FAULTS_INJECTED = Kind(
    "faults-injected",
    WARNING,
    "inject_faults is set: copies fail on purpose",
    "That is for tests. In a server it costs speed, and can end requests.",
    'remove "inject_faults"',
)

ALL = [value for value in tuple(globals().values()) if isinstance(value, Kind)]
