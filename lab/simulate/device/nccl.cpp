/* A stand-in for NCCL below PyTorch's own ProcessGroupNCCL, with what matters of NCCL's semantics:

- a communicator is made when PyTorch first needs it, and blocks its host thread until all its ranks join;
- a collective is work of a stream: the host goes on, and nothing is there before the stream is waited for;
- the collectives of a communicator are done in the order of its calls, on whichever streams;
- the ranks of a communicator must make the same calls in the same order. The first call that differs is named;
- a send waits for its receive; what stands inside ncclGroupStart and ncclGroupEnd goes at once;
- only memory of the device is taken;
- to close a communicator, all its ranks must close it, after all their work.

Ranks meet in files of one folder, PLUMBLINE_SIMULATED_SHARED. A communicator is a table in shared memory; what is sent lies
in a file of the sender. Sums are made in the order of the ranks, in float64 or int64, and rounded once: this is not NCCL's
order and rounding. */
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <linux/futex.h>
#define __CUDA_RUNTIME_H__  // nccl.h asks for headers of nvcc, of which it needs nothing
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "stream.h"

using namespace simulated;
using Seconds = std::chrono::duration<double>;
static Seconds now() { return std::chrono::steady_clock::now().time_since_epoch(); }

// ------------------------------------------------------------------------------------------------ what ranks share

enum Kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SEND, RECV };
static const char* KINDS[] = {"all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "send", "receive"};
static const char* TYPES[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16",
                              "float8_e4m3", "float8_e5m2"};
static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static const char* OPERATIONS[] = {"sum", "product", "maximum", "minimum", "average", "scaled sum"};

struct Call {
  int kind;
  int type;
  int operation;  // its index in OPERATIONS; 0 where nothing is reduced
  int root;       // 0 where there is none
  uint64_t count;

  bool operator==(const Call& other) const {
    return kind == other.kind && type == other.type && operation == other.operation && root == other.root && count == other.count;
  }
};

static std::string describe(const Call& call) {
  std::string text = std::string(KINDS[call.kind]) + " of " + std::to_string(call.count) + " " + TYPES[call.type];
  if (call.kind == BROADCAST) text += " from rank " + std::to_string(call.root) + " of the group";
  bool reduces = call.kind == ALL_REDUCE || call.kind == REDUCE_SCATTER || call.kind == REDUCE;
  if (reduces) text += std::string(" (") + OPERATIONS[call.operation] + ")";
  return text;
}

enum Left { STAYS = 0, CLOSED = 1, ABORTED = 2 };

struct Slot {  // of a rank; it alone writes there
  std::atomic<int> joined;
  std::atomic<int> left;
  std::atomic<uint64_t> posted;  // its calls that the others may read
  std::atomic<uint64_t> taken;   // its calls that are done: it has read what the others sent
  int world_rank;
  int process;
  Call call;  // the one posted last
};

struct Channel {  // from one rank to another
  std::atomic<uint64_t> posted;
  std::atomic<uint64_t> taken;
  Call call;
};

struct Table {
  std::atomic<uint32_t> bell;  // rung after every change
  Slot* slots() { return reinterpret_cast<Slot*>(this + 1); }
  Channel* channels(int ranks) { return reinterpret_cast<Channel*>(slots() + ranks); }
  static size_t bytes(int ranks) { return sizeof(Table) + ranks * sizeof(Slot) + ranks * ranks * sizeof(Channel); }
};

struct Aborted {};

// ---------------------------------------------------------------------------------------------------- arithmetic

struct Bfloat16 {
  uint16_t bits = 0;

  Bfloat16() = default;
  explicit Bfloat16(double x) {
    float value = float(x);
    uint32_t all;
    memcpy(&all, &value, 4);
    bits = std::isnan(value) ? 0x7FC0 : uint16_t((all + 0x7FFF + ((all >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
  explicit operator double() const {
    uint32_t all = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &all, 4);
    return value;
  }
};

/* Call f with a number of this type, unless that is a float of 8 bits. */
template <class F> static void typed(int type, F f) {
  switch (type) {
    case ncclInt8: return f(int8_t());
    case ncclUint8: return f(uint8_t());
    case ncclInt32: return f(int32_t());
    case ncclUint32: return f(uint32_t());
    case ncclInt64: return f(int64_t());
    case ncclUint64: return f(uint64_t());
    case ncclFloat16: return f(_Float16());
    case ncclFloat32: return f(float());
    case ncclFloat64: return f(double());
    case ncclBfloat16: return f(Bfloat16());
  }
}

template <class T> static T reduced(const std::vector<T>& values, int operation, double scale) {
  T result = values[0];
  if (operation == 5) result = T(result * scale);
  for (size_t r = 1; r < values.size(); r++) {
    T x = values[r];
    if (operation == 0 || operation == 4) result = T(result + x);
    if (operation == 1) result = T(result * x);
    if (operation == 2) result = std::max(result, x);
    if (operation == 3) result = std::min(result, x);
    if (operation == 5) result = T(result + x * scale);
  }
  return operation == 4 ? T(result / T(values.size())) : result;
}

/* Reduce equally long parts, one of each rank, into `to`: real numbers in float64, whole ones in int64, which hold what NCCL's
types hold, but for uint64 above 2^63. scale: what each rank multiplies by in a scaled sum. */
static void reduce(char* to, const std::vector<std::vector<char>>& parts, size_t count, const Call& call, double scale) {
  typed(call.type, [&](auto number) {
    using T = decltype(number);
    using Wide = std::conditional_t<std::is_integral_v<T>, int64_t, double>;
    std::vector<Wide> values(parts.size());
    for (size_t i = 0; i < count; i++) {
      for (size_t r = 0; r < parts.size(); r++) {
        memcpy(&number, parts[r].data() + i * sizeof number, sizeof number);
        values[r] = Wide(number);
      }
      number = T(reduced(values, call.operation, scale));
      memcpy(to + i * sizeof number, &number, sizeof number);
    }
  });
}

// -------------------------------------------------------------------------------------------------- communicators

struct ncclComm {
  std::string folder;
  int rank, ranks, device;
  Table* table = nullptr;
  uint64_t calls = 0;              // collectives that this rank's streams have performed
  std::atomic<int> under_way{0};   // given to a stream and not done
  Clock last;                      // the newest of its work: that of one communicator is done in the order of its calls
  std::atomic<bool> aborted{false};
  std::vector<double> scales;      // of the operations that were made for it
  std::map<std::string, int> files;
  std::mutex files_lock;

  Slot& slot(int r) { return table->slots()[r]; }
  Slot& mine() { return slot(rank); }
  Channel& channel(int from, int to) { return table->channels(ranks)[from * ranks + to]; }

  std::string members() {
    std::string text;
    for (int r = 0; r < ranks; r++) text += (r ? " " : "") + std::to_string(slot(r).world_rank);
    return text;
  }

  int file(const std::string& name) {
    std::lock_guard<std::mutex> guard(files_lock);
    auto found = files.find(name);
    if (found != files.end()) return found->second;
    int opened = open((folder + "/" + name).c_str(), O_CREAT | O_RDWR, 0600);
    return files[name] = opened;
  }

  void put(const std::string& name, const void* from, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
      ssize_t n = pwrite(file(name), static_cast<const char*>(from) + at, bytes - at, at);
      if (n <= 0) {
        finding("no room to exchange data in " + folder);
        throw Aborted();
      }
      at += n;
    }
  }

  void get(const std::string& name, void* to, size_t bytes, size_t offset) {
    size_t at = 0;
    while (at < bytes) {
      ssize_t n = pread(file(name), static_cast<char*>(to) + at, bytes - at, offset + at);
      if (n <= 0) throw Aborted();
      at += n;
    }
  }

  void ring() {
    table->bell.fetch_add(1);
    syscall(SYS_futex, &table->bell, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }

  bool is_gone(int r) { return slot(r).left.load() == ABORTED || (slot(r).joined.load() && kill(slot(r).process, 0) != 0); }

  /* Until done(r) holds for every rank r. `what` completes "rank 1 never ..."; what never comes is a finding, and the stream
  stands still from then on, as it does under NCCL. */
  template <class Done> void wait(Done done, const std::string& what) {
    Seconds patience(atof(setting("PLUMBLINE_SIMULATED_NCCL_SECONDS", "60").c_str()));
    Seconds began = now();
    bool said = false;
    for (;;) {
      uint32_t heard = table->bell.load();
      std::string missing;
      bool gone = false;
      for (int r = 0; r < ranks; r++) {
        if (done(r)) continue;
        missing += (missing.empty() ? "" : " ") + (slot(r).joined.load() ? std::to_string(slot(r).world_rank) : "?");
        gone = gone || is_gone(r);
      }
      if (missing.empty()) return;
      if (aborted.load()) throw Aborted();
      bool too_late = gone || now() - began > patience;
      if (too_late && !said) {
        said = true;
        stuck("rank " + missing + (gone ? " has left and" : "") + " never " + what + "; rank " + setting("RANK", "0") + " waits");
      }
      struct timespec a_moment = {0, 50000000};
      syscall(SYS_futex, &table->bell, FUTEX_WAIT, heard, &a_moment, nullptr, 0);
    }
  }

  void collective(const Call& call, const void* from, size_t bytes, void* to, double scale);
  void post(const Call& call, const void* from, int peer);
  void take(const Call& call, void* to, int peer);
};

void ncclComm::collective(const Call& call, const void* from, size_t bytes, void* to, double scale) {
  uint64_t number = ++calls;
  std::string what = "joined " + describe(call) + ", collective " + std::to_string(number) + " of the group of ranks " + members();
  wait([&](int r) { return slot(r).taken.load() >= number - 1; }, what);
  put("from-" + std::to_string(rank), from, bytes);
  mine().call = call;
  mine().posted.store(number);
  ring();
  wait([&](int r) { return slot(r).posted.load() >= number; }, what);
  for (int r = 0; r < ranks; r++) {
    if (slot(r).call == call) continue;
    int first = std::min(r, rank), second = std::max(r, rank);
    stuck("collective " + std::to_string(number) + " of the group of ranks " + members() + " differs: rank " +
            std::to_string(slot(first).world_rank) + " calls " + describe(slot(first).call) + ", rank " +
            std::to_string(slot(second).world_rank) + " " + describe(slot(second).call));
    wait([&](int) { return false; }, "agreed");
  }
  char* out = static_cast<char*>(to);
  size_t size = SIZES[call.type];
  size_t part = call.count * size;  // bytes
  std::vector<std::vector<char>> parts;
  for (int r = 0; r < ranks; r++) {
    std::string name = "from-" + std::to_string(r);
    bool reduces = call.kind == ALL_REDUCE || call.kind == REDUCE_SCATTER || (call.kind == REDUCE && rank == call.root);
    if (reduces) {
      parts.emplace_back(part);
      get(name, parts.back().data(), part, call.kind == REDUCE_SCATTER ? rank * part : 0);
    }
    if (call.kind == ALL_GATHER) get(name, out + r * part, part, 0);
    if (call.kind == ALL_TO_ALL) get(name, out + r * part, part, rank * part);
    if (call.kind == BROADCAST && r == call.root) get(name, out, part, 0);
  }
  if (!parts.empty()) reduce(out, parts, call.count, call, scale);
  mine().taken.store(number);
  ring();
}

void ncclComm::post(const Call& call, const void* from, int peer) {
  Channel& channel = this->channel(rank, peer);
  put("from-" + std::to_string(rank) + "-to-" + std::to_string(peer), from, call.count * SIZES[call.type]);
  channel.call = call;
  channel.posted.fetch_add(1);
  ring();
}

void ncclComm::take(const Call& call, void* to, int peer) {
  Channel& channel = this->channel(peer, rank);
  std::string who = std::to_string(slot(rank).world_rank);
  std::string what = "sent what rank " + who + " receives: " + std::to_string(call.count) + " " + TYPES[call.type];
  uint64_t number = channel.taken.load() + 1;
  wait([&](int r) { return r != peer || channel.posted.load() >= number; }, what);
  bool same = channel.call.type == call.type && channel.call.count == call.count;
  if (!same) {
    stuck("rank " + std::to_string(slot(peer).world_rank) + " sends " + std::to_string(channel.call.count) + " " +
            TYPES[channel.call.type] + ", but rank " + who + " receives " + std::to_string(call.count) + " " + TYPES[call.type]);
    wait([&](int) { return false; }, "agreed");
  }
  get("from-" + std::to_string(peer) + "-to-" + std::to_string(rank), to, call.count * SIZES[call.type], 0);
  channel.taken.store(number);
  ring();
}

// ---------------------------------------------------------------------------------------------------------- calls

struct Request {
  ncclComm* comm;
  Stream* stream;
  Call call;
  const void* from;
  size_t bytes;  // that are sent
  void* to;
  size_t received;  // bytes
  int peer;
  double scale;
};

static thread_local int depth = 0;
static thread_local std::vector<Request>& group = *new std::vector<Request>;

static std::mutex& log_lock = *new std::mutex;
static std::map<std::string, uint64_t>& collectives = *new std::map<std::string, uint64_t>;

/* A line of JSON without its number, so that equal collectives are counted together. */
static void count(const Request& request) {
  const Call& call = request.call;
  std::string key = "\"ranks\": \"" + request.comm->members() + "\", \"kind\": \"" + KINDS[call.kind] + "\", \"type\": \"" +
                    TYPES[call.type] + "\", \"count\": " + std::to_string(call.count);
  std::lock_guard<std::mutex> guard(log_lock);
  collectives[key] += 1;
}

static bool overlap(const Request& request) {
  const char* from = static_cast<const char*>(request.from);
  const char* to = static_cast<const char*>(request.to);
  return from < to + request.received && to < from + request.bytes;
}

/* Perform what one communicator and one stream have in a group: at once what is sent and received, the rest in its order. */
static void perform(const std::vector<Request>& requests) {
  ncclComm* comm = requests[0].comm;
  int delay = atoi(setting("PLUMBLINE_SIMULATED_NCCL_DELAY", "0").c_str());
  if (delay) usleep(delay);
  try {
    for (const Request& request : requests)
      if (request.call.kind < SEND) comm->collective(request.call, request.from, request.bytes, request.to, request.scale);
    std::map<int, std::deque<const Request*>> sends;
    for (const Request& request : requests)
      if (request.call.kind == SEND) sends[request.peer].push_back(&request);
    std::deque<const Request*> receives;
    for (const Request& request : requests)
      if (request.call.kind == RECV) receives.push_back(&request);
    auto send_next = [&](int peer) {
      if (sends[peer].empty()) return;
      Channel& channel = comm->channel(comm->rank, peer);
      if (channel.posted.load() != channel.taken.load()) return;
      comm->post(sends[peer].front()->call, sends[peer].front()->from, peer);
      sends[peer].pop_front();
    };
    auto is_sent = [&](int peer) {
      Channel& channel = comm->channel(comm->rank, peer);
      return sends[peer].empty() && channel.posted.load() == channel.taken.load();
    };
    for (auto& [peer, queue] : sends) send_next(peer);
    for (const Request* request : receives) {
      comm->take(request->call, request->to, request->peer);
      for (auto& [peer, queue] : sends) send_next(peer);
    }
    for (auto& [peer, queue] : sends) {
      int to = peer;
      while (!is_sent(to)) {
        std::string what = "received what rank " + std::to_string(comm->mine().world_rank) + " sends";
        Channel& channel = comm->channel(comm->rank, to);
        comm->wait([&](int r) { return r != to || channel.posted.load() == channel.taken.load(); }, what);
        send_next(to);
      }
    }
  } catch (Aborted&) {
  }
  comm->under_way -= 1;
}

static void give(const std::vector<Request>& requests) {
  for (const Request& request : requests) {
    count(request);
    settle(request.stream);
    bool may_poison = request.to && !overlap(request);
    if (may_poison) memset(request.to, 0xFF, request.received);  // whoever reads it before it has arrived reads NaN
  }
  ncclComm* comm = requests[0].comm;
  Stream* stream = requests[0].stream;
  comm->under_way += 1;
  Ticket ticket = enqueue(stream, [requests] { perform(requests); }, comm->last);
  comm->last = {{stream, ticket}};
}

static void end_of_group() {
  std::vector<Request> all;
  all.swap(group);
  std::map<std::pair<ncclComm*, Stream*>, std::vector<Request>> parts;
  std::vector<std::pair<ncclComm*, Stream*>> order;
  for (const Request& request : all) {
    auto key = std::make_pair(request.comm, request.stream);
    if (!parts.count(key)) order.push_back(key);
    parts[key].push_back(request);
  }
  for (const auto& key : order) give(parts[key]);
}

static bool is_on_device(const void* pointer) {
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, pointer);
  return attributes.type == cudaMemoryTypeDevice;
}

static ncclResult_t ask(Request request, int operation) {
  bool wrong_send = request.bytes && !is_on_device(request.from);
  bool wrong_receive = request.received && !is_on_device(request.to);
  if (wrong_send || wrong_receive) {
    finding("NCCL was given memory of the host: " + describe(request.call) + " of the group of ranks " + request.comm->members());
    return ncclInvalidArgument;
  }
  request.call.operation = operation < ncclNumOps ? operation : 5;
  request.scale = operation < ncclNumOps ? 1 : request.comm->scales[operation - ncclNumOps];
  bool alone = depth == 0;
  group.push_back(request);
  if (alone) end_of_group();
  return ncclSuccess;
}

static Request request(Kind kind, const void* from, size_t sent, void* to, size_t received, size_t count, ncclDataType_t type,
                       int root, ncclComm_t comm, cudaStream_t stream) {
  Call call = {kind, int(type), 0, root, count};
  size_t size = SIZES[type];
  return {comm, stream_of(stream), call, from, sent * size, to, received * size, root, 1};
}

extern "C" {

ncclResult_t ncclGetVersion(int* version) { return give(version, NCCL_VERSION_CODE); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::string name = setting("PLUMBLINE_SIMULATED_SHARED", "/tmp") + "/group-XXXXXX";
  memset(id, 0, sizeof *id);
  if (name.size() >= sizeof id->internal || !mkdtemp(name.data())) return ncclSystemError;
  strcpy(id->internal, name.c_str());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  auto comm = new ncclComm;
  comm->folder = id.internal;
  comm->rank = rank;
  comm->ranks = ranks;
  cudaGetDevice(&comm->device);
  int file = open((comm->folder + "/table").c_str(), O_CREAT | O_RDWR, 0600);
  size_t bytes = Table::bytes(ranks);
  if (file < 0 || ftruncate(file, bytes)) return ncclSystemError;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return ncclSystemError;
  comm->table = static_cast<Table*>(memory);
  comm->mine().world_rank = atoi(setting("RANK", "0").c_str());
  comm->mine().process = getpid();
  comm->mine().joined.store(1);
  comm->ring();
  std::string what = "joined a communicator of " + std::to_string(ranks) + " ranks, which is made at its first collective";
  comm->wait([&](int r) { return comm->slot(r).joined.load() == 1; }, what);
  *made = comm;
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
  return ncclCommInitRankConfig(made, ranks, ids[0], rank, config);
}

/* Close it: when its own work is done, and all of its ranks close it too. */
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (comm->mine().left.load() != STAYS) return ncclSuccess;
  try {
    while (comm->under_way.load() && !comm->aborted.load()) usleep(500);
    comm->mine().left.store(CLOSED);
    comm->ring();
    comm->wait([&](int r) { return comm->slot(r).left.load() != STAYS; }, "closed the group of ranks " + comm->members());
  } catch (Aborted&) {
  }
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommFinalize(comm); }

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted.store(true);
  comm->mine().left.store(ABORTED);
  comm->ring();
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return give(error, ncclSuccess); }

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return give(count, comm->ranks); }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return give(rank, comm->rank); }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { return give(device, comm->device); }

const char* ncclGetErrorString(ncclResult_t) { return "an error of the simulated NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGroupStart() {
  depth += 1;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  depth -= 1;
  if (depth == 0) end_of_group();
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* made, void* scalar, ncclDataType_t type, ncclScalarResidence_t where,
                                      ncclComm_t comm) {
  if (where == ncclScalarDevice) settle(stream_of(nullptr));
  double scale = 0;
  typed(type, [&](auto number) {
    memcpy(&number, scalar, sizeof number);
    scale = double(number);
  });
  comm->scales.push_back(scale);
  *made = ncclRedOp_t(ncclNumOps + comm->scales.size() - 1);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm,
                           cudaStream_t stream) {
  return ask(request(ALL_REDUCE, from, count, to, count, count, type, 0, comm, stream), operation);
}

ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  size_t received = comm->rank == root ? count : 0;
  return ask(request(REDUCE, from, count, to, received, count, type, root, comm, stream), operation);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                               ncclComm_t comm, cudaStream_t stream) {
  return ask(request(REDUCE_SCATTER, from, count * comm->ranks, to, count, count, type, 0, comm, stream), operation);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return ask(request(ALL_GATHER, from, count, to, count * comm->ranks, count, type, 0, comm, stream), 0);
}

ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  size_t all = count * comm->ranks;
  return ask(request(ALL_TO_ALL, from, all, to, all, count, type, 0, comm, stream), 0);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t sent = comm->rank == root ? count : 0;
  return ask(request(BROADCAST, from, sent, to, count, count, type, root, comm, stream), 0);
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return ask(request(SEND, from, count, nullptr, 0, count, type, peer, comm, stream), 0);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return ask(request(RECV, nullptr, 0, to, count, count, type, peer, comm, stream), 0);
}

ncclResult_t ncclMemAlloc(void** start, size_t bytes) { return cudaMalloc(start, bytes) ? ncclSystemError : ncclSuccess; }
ncclResult_t ncclMemFree(void* start) { return cudaFree(start) ? ncclSystemError : ncclSuccess; }

/* The collectives that this rank has asked for, one line of JSON for each kind, size and group. */
const char* simulated_collectives() {
  static std::string text;
  std::lock_guard<std::mutex> guard(log_lock);
  text.clear();
  for (const auto& [key, times] : collectives) text += "{" + key + ", \"times\": " + std::to_string(times) + "}\n";
  return text.c_str();
}

// What PyTorch offers beyond plain groups, and this project does not use. PyTorch turns the answer into an exception.
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) { return ncclInvalidUsage; }
ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) { return ncclInvalidUsage; }
ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return ncclInvalidUsage; }
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void**) { return ncclInvalidUsage; }
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclInvalidUsage; }
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) { return ncclInvalidUsage; }
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclInvalidUsage; }
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return ncclInvalidUsage; }
}
