/* A stand-in for CUDA's runtime and driver. Device memory is host memory. PyTorch's own code above it (device guards, the
caching allocators, streams, events, pinned memory) is the real one.

A kernel that is launched has no stand-in among lab/simulate/kernels.py, and fails: it must not leave memory as it was in
silence. */
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "stream.h"

#undef cudaGetDeviceProperties
#undef cuDevicePrimaryCtxGetState
#undef cuDevicePrimaryCtxRetain

using namespace simulated;

static const size_t MEMORY = 85520809984;  // bytes of an H100 of 80 GB, as it reports them
static const int VERSION = 13000;          // CUDA 13.0, in its own notation

static thread_local int device = 0;
static thread_local cudaError_t last_error = cudaSuccess;

static int devices() { return atoi(setting("PLUMBLINE_SIMULATED_GPUS", "1").c_str()); }

static cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

namespace simulated {
Stream* stream_of(int number, void* handle) {
  bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? default_stream(number) : static_cast<Stream*>(handle);
}

Stream* stream_of(void* handle) { return stream_of(device, handle); }
}  // namespace simulated

// ------------------------------------------------------------------------------------------------------- memory

enum Kind { DEVICE, PINNED };

struct Range {
  size_t bytes;
  Kind kind;
  int device;
};

static std::mutex& memory_lock = *new std::mutex;
static std::map<char*, Range>& ranges = *new std::map<char*, Range>;
static std::map<int, size_t>& used = *new std::map<int, size_t>;

static void remember(void* start, size_t bytes, Kind kind) {
  std::lock_guard<std::mutex> guard(memory_lock);
  ranges[static_cast<char*>(start)] = {bytes, kind, device};
  if (kind == DEVICE) used[device] += bytes;
}

static Range forget(void* start) {
  std::lock_guard<std::mutex> guard(memory_lock);
  auto found = ranges.find(static_cast<char*>(start));
  if (found == ranges.end()) return {0, DEVICE, 0};
  Range range = found->second;
  if (range.kind == DEVICE) used[range.device] -= range.bytes;
  ranges.erase(found);
  return range;
}

static bool find(const void* pointer, Range* range) {
  std::lock_guard<std::mutex> guard(memory_lock);
  char* address = static_cast<char*>(const_cast<void*>(pointer));
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  auto found = std::prev(after);
  if (address >= found->first + found->second.bytes) return false;
  *range = found->second;
  return true;
}

static bool is_pinned(const void* pointer) {
  Range range;
  return find(pointer, &range) && range.kind == PINNED;
}

static bool is_on_device(const void* pointer) {
  Range range;
  return find(pointer, &range) && range.kind == DEVICE;
}

static cudaError_t copy(void* to, const void* from, size_t bytes, Stream* stream, bool may_return_early) {
  if (is_pinned(to) && is_on_device(from) && may_return_early) {
    copy_to_host(stream, to, from, bytes);
  } else if (is_on_device(to) && is_pinned(from) && may_return_early) {
    copy_to_device(stream, to, from, bytes);
  } else {
    bool to_the_host = !is_on_device(to);
    if (to_the_host || !may_return_early) host_waits(clock_of(stream));
    settle(stream);
    memmove(to, from, bytes);
  }
  return cudaSuccess;
}

extern "C" {

int simulated_is_pinned(const void* pointer) { return is_pinned(pointer); }

cudaError_t cudaMalloc(void** start, size_t bytes) {
  size_t in_use;
  {
    std::lock_guard<std::mutex> guard(memory_lock);
    in_use = used[device];
  }
  if (in_use + bytes > MEMORY) return failed(cudaErrorMemoryAllocation);
  if (posix_memalign(start, 512, bytes ? bytes : 1)) return failed(cudaErrorMemoryAllocation);
  memset(*start, 0xFF, bytes);  // whoever reads it before it is written reads NaN
  remember(*start, bytes, DEVICE);
  return cudaSuccess;
}

cudaError_t cudaFree(void* start) {
  if (!start) return cudaSuccess;
  host_waits(clock_of_device(device));
  forget(start);
  free(start);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** start, size_t bytes, cudaStream_t) { return cudaMalloc(start, bytes); }
cudaError_t cudaFreeAsync(void* start, cudaStream_t) { return cudaFree(start); }

cudaError_t cudaHostAlloc(void** start, size_t bytes, unsigned) {
  if (posix_memalign(start, 4096, bytes ? bytes : 1)) return failed(cudaErrorMemoryAllocation);
  remember(*start, bytes, PINNED);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* start) {
  Range range = forget(start);
  host_memory_goes(start, range.bytes);
  free(start);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* start, size_t bytes, unsigned) {
  remember(start, bytes, PINNED);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* start) {
  Range range = forget(start);
  host_memory_goes(start, range.bytes);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> guard(memory_lock);
  *total = MEMORY;
  *free_bytes = MEMORY - used[device];
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, default_stream(device), false);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream_of(stream), true);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream_of(stream), true);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  settle(stream_of(stream));
  memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* answer, const void* pointer) {
  memset(answer, 0, sizeof *answer);
  Range range;
  if (!find(pointer, &range)) return cudaSuccess;  // its type stays 0: not registered
  answer->type = range.kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  answer->device = range.device;
  answer->devicePointer = const_cast<void*>(pointer);
  answer->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(new_stream(device, priority));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  host_waits(clock_of(stream_of(stream)));
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  host_waits(clock_of_device(device));
  return cudaSuccess;
}

/* Work that takes no time on this host is answered as not done at first: a program that asks once and goes on is seen. */
static cudaError_t answer(const Clock& clock, int asked) {
  if (!is_done(clock)) return cudaErrorNotReady;
  if (has_copies(clock) && asked < 3) return cudaErrorNotReady;
  copies_are_done(clock);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) { return answer(clock_of(stream_of(stream)), 3); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  wait_event(stream_of(stream), reinterpret_cast<Event*>(event));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (status) *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  enqueue(stream_of(stream), [function, argument] { function(argument); });
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned) {
  enqueue(stream_of(stream), [=] { function(stream, cudaSuccess, argument); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  record(reinterpret_cast<Event*>(event), stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  host_waits(clock_of_event(reinterpret_cast<Event*>(event)));
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Event* asked = reinterpret_cast<Event*>(event);
  asked->asked += 1;
  return answer(clock_of_event(asked), asked->asked);
}

/* No time passes on a simulated GPU that would say anything about a real one. */
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { return give(milliseconds, 1.0f); }

// ------------------------------------------------------------------------------------------------------ kernels

static cudaError_t no_kernel() {
  finding("a CUDA kernel was launched for which the simulation has no CPU kernel; the operator raises");
  return failed(cudaErrorNotSupported);
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return no_kernel(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return no_kernel(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return no_kernel(); }
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return no_kernel(); }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = 90;
  attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------- device

cudaError_t cudaGetDeviceCount(int* count) { return give(count, devices()); }
cudaError_t cudaGetDevice(int* number) { return give(number, device); }
cudaError_t cudaSetDevice(int number) {
  if (number < 0 || number >= devices()) return failed(cudaErrorInvalidDevice);
  device = number;
  return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "simulated";
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorNotSupported) return "the simulated GPU has no kernel for this operator";
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaErrorInvalidDevice) return "invalid device ordinal";
  return "an error of the simulated GPU";
}

cudaError_t cudaDriverGetVersion(int* version) { return give(version, VERSION); }
cudaError_t cudaRuntimeGetVersion(int* version) { return give(version, VERSION); }

/* Those of an H100 SXM, as NVIDIA publishes them. PyTorch picks its kernels by them. */
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "NVIDIA H100 80GB HBM3");
  memset(&properties->uuid, 0x10 + number, sizeof properties->uuid);
  properties->totalGlobalMem = MEMORY;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->regsPerBlock = 65536;
  properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->memPitch = 2147483647;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = 1024;
  properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = 65535;
  properties->maxGridSize[2] = 65535;
  properties->totalConstMem = 65536;
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = 132;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->l2CacheSize = 52428800;
  properties->memoryBusWidth = 5120;
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->asyncEngineCount = 3;
  properties->managedMemory = 1;
  properties->canMapHostMemory = 1;
  properties->pciBusID = number + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = 1;
  if (attribute == cudaDevAttrComputeCapabilityMajor) *value = 9;
  if (attribute == cudaDevAttrComputeCapabilityMinor) *value = 0;
  if (attribute == cudaDevAttrMultiProcessorCount) *value = 132;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int number) {
  snprintf(text, length, "0000:%02x:00.0", number + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return give(can, 1); }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return give(pool, reinterpret_cast<cudaMemPool_t>(1)); }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) { return give(address, const_cast<void*>(symbol)); }
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

// ------------------------------------------------------------------------------------------------------- driver

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return give(version, VERSION); }
CUresult cuDeviceGetCount(int* count) { return give(count, devices()); }
CUresult cuDeviceGet(CUdevice* handle, int number) { return give(handle, number); }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { return give(value, 0); }
/* Autograd asks whether a device has a context before it starts that device's thread. */
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return give(context, reinterpret_cast<CUcontext>(1)); }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return give(text, "an error of the simulated driver"); }
CUresult cuGetErrorName(CUresult, const char** text) { return give(text, "simulated"); }

static CUresult not_there() { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuDeviceGet", reinterpret_cast<void*>(cuDeviceGet)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(cuDeviceGetAttribute)},
      {"cuGetErrorString", reinterpret_cast<void*>(cuGetErrorString)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(cuCtxGetCurrent)},
  };
  auto found = known.find(name);
  *function = found == known.end() ? reinterpret_cast<void*>(not_there) : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
