"""The public names: for type checkers and editors, and for __init__.py, which imports them."""

from communicator import Communicator as Communicator
from communicator import CommunicatorError as CommunicatorError
from communicator import CommunicatorTimeout as CommunicatorTimeout
from communicator import Unsupported as Unsupported
from communicator import backend_names as backend_names
from coordinator import Coordinator as Coordinator
from coordinator import CoordinatorError as CoordinatorError
from coordinator import CoordinatorTimeout as CoordinatorTimeout
from coordinator import DrumlineError as DrumlineError
from coordinator import Peer as Peer
from coordinator import PeerLost as PeerLost
from coordinator import RankFailure as RankFailure
from coordinator import RemoteError as RemoteError
from drumline.checkpoint.disk_cache.weight_cache import WeightCache as WeightCache
from drumline.checkpoint.plan_executor import LoadStats as LoadStats
from drumline.checkpoint.shard_loader import load_into as load_into
from drumline.compile_once.artifact_cache import BuildError as BuildError
from drumline.compile_once.device_check import assert_device as assert_device
from drumline.compile_once.device_check import check_devices as check_devices
from drumline.compile_once.device_mapping import HoistError as HoistError
from drumline.compile_once.device_mapping import HoistReport as HoistReport
from drumline.compile_once.device_mapping import UnmappedDevice as UnmappedDevice
from drumline.compile_once.hoist import hoist as hoist
from drumline.compile_once.hoist import hoist_package as hoist_package
from drumline.compile_once.portable import check_no_process_groups as check_no_process_groups
from drumline.compile_once.portable import trace_portable as trace_portable
from drumline.compile_once.precompile import (
    assert_identical_on_ranks as assert_identical_on_ranks,
)
from drumline.compile_once.precompile import fingerprint as fingerprint
from drumline.compile_once.precompile import get_or_build as get_or_build
from drumline.compile_once.precompile import precompile as precompile
from drumline.compile_once.precompile import precompile_modules as precompile_modules
from drumline.core.device_map import DeviceMap as DeviceMap
from drumline.core.device_map import ModelProfile as ModelProfile
from drumline.core.device_map import ModulePart as ModulePart
from drumline.core.device_map import Place as Place
from drumline.core.mesh import Mesh as Mesh
from drumline.core.shards import ShardSpec as ShardSpec
from drumline.errors import CheckpointError as CheckpointError
from drumline.errors import MissingPackage as MissingPackage
from drumline.errors import PlanError as PlanError
from drumline.errors import StageError as StageError
from drumline.errors import WorkerExit as WorkerExit
from drumline.planner.cost_model import DeviceSpeed as DeviceSpeed
from drumline.planner.cost_model import DeviceSpeeds as DeviceSpeeds
from drumline.planner.cost_model import Estimate as Estimate
from drumline.planner.cost_model import LinkSpeed as LinkSpeed
from drumline.planner.cost_model import PassShape as PassShape
from drumline.planner.cost_model import estimate as estimate
from drumline.planner.cost_model import uniform_speeds as uniform_speeds
from drumline.planner.measure import measure_speeds as measure_speeds
from drumline.planner.memory import cluster_memory as cluster_memory
from drumline.planner.plan import plan as plan
from drumline.strategies.accelerate_compat import dispatch_model as dispatch_model
from drumline.strategies.accelerate_compat import get_balanced_memory as get_balanced_memory
from drumline.strategies.accelerate_compat import get_max_memory as get_max_memory
from drumline.strategies.accelerate_compat import infer_auto_device_map as infer_auto_device_map
from drumline.strategies.accelerate_compat import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)
from drumline.strategies.existing_model import dispatch as dispatch
from drumline.strategies.load import load as load
from drumline.tensor_parallel.parallelize import local_shard as local_shard
from drumline.tensor_parallel.parallelize import parallelize as parallelize
from drumline.tensor_parallel.parallelize import shard_specs as shard_specs
from drumline.tensor_parallel.tp_layers import insert_collectives as insert_collectives
from drumline.tensor_parallel.tp_plan import read_plan as read_plan
from launcher import Launch as Launch
from launcher import LaunchError as LaunchError
from launcher import LaunchInfo as LaunchInfo
from launcher import current as current
from launcher import launch as launch
from launcher import start as start

__version__: str
