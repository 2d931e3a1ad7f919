/* Streams of a simulated GPU: what is in order with what, and what is still under way.

Kernels run at once, on the thread that launches them (lab/simulate/kernels.py). Two things take time here as they do on a
GPU: collectives between ranks, which a thread per stream performs, and copies between pinned memory and the device, which
are not known to be done before the host has waited for them.

A stream counts its work in tickets. A clock says, for each stream, up to which ticket its work lies before a point. An
event keeps the clock of the stream that recorded it; a stream that waits for the event takes that clock over. So whether
a piece of work is ordered before another is a comparison of two numbers. */
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

using Ticket = uint64_t;
struct Stream;
using Clock = std::map<Stream*, Ticket>;

struct Work {
  Ticket ticket;
  Clock after;  // it may begin when this is done
  std::function<void()> run;
};

struct Stream {
  int device = 0;
  int priority = 0;
  Ticket issued = 0;
  Clock clock;              // everything that its next piece of work comes after
  std::deque<Work> queue;   // not done; the first one may be running
  bool has_worker = false;
};

struct Event {
  Clock clock;
  int asked = 0;  // how often the host has asked whether it is done
};

/* A copy between pinned memory and the device of which the host does not know yet that it is done. */
struct Copy {
  Stream* stream;
  Ticket ticket;
  bool to_host;
  char* host;
  std::vector<char> bytes;  // what arrives on the host, or what lay there when the copy to the device was begun
  std::string where;        // file:line of the program
};

/* 0, of CUDA's runtime and driver and of NCCL. */
struct Success {
  template <class Result> operator Result() const { return Result(0); }
};

/* Answer a question of the program. */
template <class T, class Value> Success give(T* answer, Value value) {
  *answer = T(value);
  return {};
}

/* What a person should know: written to findings-<rank> in PLUMBLINE_SIMULATED_FOLDER, each once, and to stderr. */
void finding(const std::string& sentence);
/* A finding after which this rank cannot go on: it is written to stuck-<rank> as well. */
void stuck(const std::string& sentence);
std::string setting(const char* name, const char* otherwise);

/* All of what follows takes the one lock of the device. */
Stream* new_stream(int device, int priority);
Stream* default_stream(int device);
void record(Event* event, Stream* stream);
void wait_event(Stream* stream, Event* event);
bool is_done(const Clock& clock);
Clock clock_of(Stream* stream);
Clock clock_of_device(int device);
Clock clock_of_event(Event* event);

/* Give work to the stream's thread. It comes after what the stream waits for and after `also`; returns its ticket. */
Ticket enqueue(Stream* stream, std::function<void()> run, const Clock& also = {});
/* Wait until all work that lies before the stream's next piece of work is done. */
void settle(Stream* stream);
/* The host waits: afterwards the work of this clock is done, and the host knows it, so that copies have arrived. */
void host_waits(const Clock& clock);
/* The host learns that the work of this clock is done. Call it only when it is. */
void copies_are_done(const Clock& clock);
bool has_copies(const Clock& clock);

void copy_to_host(Stream* stream, void* host, const void* device, size_t bytes);
void copy_to_device(Stream* stream, void* device, const void* host, size_t bytes);
/* Pinned memory is about to go: what is under way from or to it is done now. */
void host_memory_goes(void* host, size_t bytes);

Stream* stream_of(int device, void* handle);  // of CUDA's handle
Stream* stream_of(void* handle);              // the same on the calling thread's device

}  // namespace simulated
