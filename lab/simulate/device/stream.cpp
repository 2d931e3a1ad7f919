#include "stream.h"

#include <cstdio>
#include <cstdlib>
#include <set>

namespace simulated {

// Never destroyed: threads use them until the process is gone.
static std::mutex& lock = *new std::mutex;
static std::condition_variable& changed = *new std::condition_variable;
static std::list<Copy>& copies = *new std::list<Copy>;
static std::set<Stream*>& streams = *new std::set<Stream*>;

static thread_local std::string place;

std::string setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

static void append(const std::string& name, const std::string& sentence) {
  std::string folder = setting("PLUMBLINE_SIMULATED_FOLDER", "");
  if (folder.empty()) return;
  std::string path = folder + "/" + name + "-" + setting("RANK", "0");
  if (FILE* file = fopen(path.c_str(), "a")) {
    fprintf(file, "%s\n", sentence.c_str());
    fclose(file);
  }
}

void finding(const std::string& sentence) {
  static std::mutex& mine = *new std::mutex;
  static std::set<std::string>& said = *new std::set<std::string>;
  std::lock_guard<std::mutex> guard(mine);
  if (!said.insert(sentence).second) return;
  fprintf(stderr, "simulated GPU: %s\n", sentence.c_str());
  append("findings", sentence);
}

void stuck(const std::string& sentence) {
  finding(sentence);
  append("stuck", sentence);
}

Stream* new_stream(int device, int priority) {
  std::lock_guard<std::mutex> guard(lock);
  Stream* stream = new Stream;
  stream->device = device;
  stream->priority = priority;
  streams.insert(stream);
  return stream;
}

Stream* default_stream(int device) {
  static std::mutex& mine = *new std::mutex;
  static std::map<int, Stream*>& made = *new std::map<int, Stream*>;
  std::lock_guard<std::mutex> guard(mine);
  Stream*& stream = made[device];
  if (!stream) stream = new_stream(device, 0);
  return stream;
}

static void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, ticket] : other) {
    Ticket& mine = into[stream];
    if (mine < ticket) mine = ticket;
  }
}

static Ticket issue(Stream* stream) {
  stream->issued += 1;
  stream->clock[stream] = stream->issued;
  return stream->issued;
}

void record(Event* event, Stream* stream) {
  std::lock_guard<std::mutex> guard(lock);
  event->clock = stream->clock;
  event->asked = 0;
}

void wait_event(Stream* stream, Event* event) {
  std::lock_guard<std::mutex> guard(lock);
  merge(stream->clock, event->clock);
}

static bool done_locked(const Clock& clock) {
  for (const auto& [stream, ticket] : clock) {
    bool pending = !stream->queue.empty() && stream->queue.front().ticket <= ticket;
    if (pending) return false;
  }
  return true;
}

bool is_done(const Clock& clock) {
  std::lock_guard<std::mutex> guard(lock);
  return done_locked(clock);
}

Clock clock_of(Stream* stream) {
  std::lock_guard<std::mutex> guard(lock);
  return stream->clock;
}

Clock clock_of_device(int device) {
  std::lock_guard<std::mutex> guard(lock);
  Clock clock;
  for (Stream* stream : streams)
    if (stream->device == device) merge(clock, stream->clock);
  return clock;
}

Clock clock_of_event(Event* event) {
  std::lock_guard<std::mutex> guard(lock);
  return event->clock;
}

static void work_of(Stream* stream) {
  std::unique_lock<std::mutex> guard(lock);
  for (;;) {
    changed.wait(guard, [&] { return !stream->queue.empty() && done_locked(stream->queue.front().after); });
    std::function<void()> run = stream->queue.front().run;
    guard.unlock();
    run();
    guard.lock();
    stream->queue.pop_front();
    changed.notify_all();
  }
}

Ticket enqueue(Stream* stream, std::function<void()> run, const Clock& also) {
  std::lock_guard<std::mutex> guard(lock);
  Clock after = stream->clock;
  merge(after, also);
  after.erase(stream);  // its own work is done in turn
  Ticket ticket = issue(stream);
  stream->queue.push_back({ticket, after, std::move(run)});
  if (!stream->has_worker) {
    stream->has_worker = true;
    std::thread(work_of, stream).detach();
  }
  changed.notify_all();
  return ticket;
}

static void wait_until_done(std::unique_lock<std::mutex>& guard, const Clock& clock) {
  changed.wait(guard, [&] { return done_locked(clock); });
}

void settle(Stream* stream) {
  std::unique_lock<std::mutex> guard(lock);
  if (done_locked(stream->clock)) return;
  Clock clock = stream->clock;
  wait_until_done(guard, clock);
}

static bool covers(const Clock& clock, const Copy& copy) {
  auto found = clock.find(copy.stream);
  return found != clock.end() && found->second >= copy.ticket;
}

static void finish(const Copy& copy) {
  if (copy.to_host) {
    memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
  } else if (memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) != 0) {
    finding("pinned memory was written before its copy to the GPU was done: " + std::to_string(copy.bytes.size()) +
            " bytes, copied at " + copy.where);
  }
}

void copies_are_done(const Clock& clock) {
  std::lock_guard<std::mutex> guard(lock);
  for (auto copy = copies.begin(); copy != copies.end();) {
    if (!covers(clock, *copy)) {
      ++copy;
      continue;
    }
    finish(*copy);
    copy = copies.erase(copy);
  }
}

bool has_copies(const Clock& clock) {
  std::lock_guard<std::mutex> guard(lock);
  for (const Copy& copy : copies)
    if (covers(clock, copy)) return true;
  return false;
}

void host_waits(const Clock& clock) {
  {
    std::unique_lock<std::mutex> guard(lock);
    wait_until_done(guard, clock);
  }
  copies_are_done(clock);
}

void copy_to_host(Stream* stream, void* host, const void* device, size_t bytes) {
  settle(stream);
  const char* from = static_cast<const char*>(device);
  std::vector<char> content(from, from + bytes);
  std::lock_guard<std::mutex> guard(lock);
  memset(host, 0xFF, bytes);  // who reads it before it has arrived reads NaN
  copies.push_back({stream, issue(stream), true, static_cast<char*>(host), std::move(content), place});
}

void copy_to_device(Stream* stream, void* device, const void* host, size_t bytes) {
  settle(stream);
  const char* from = static_cast<const char*>(host);
  std::vector<char> content(from, from + bytes);
  std::lock_guard<std::mutex> guard(lock);
  for (const Copy& copy : copies) {  // a copy to the host that this one comes after has arrived when this one begins
    bool before = copy.to_host && covers(stream->clock, copy);
    if (!before) continue;
    char* first = std::max(copy.host, const_cast<char*>(from));
    char* last = std::min(copy.host + copy.bytes.size(), const_cast<char*>(from) + bytes);
    if (first < last) memcpy(content.data() + (first - from), copy.bytes.data() + (first - copy.host), last - first);
  }
  memcpy(device, content.data(), bytes);
  content.assign(from, from + bytes);
  copies.push_back({stream, issue(stream), false, const_cast<char*>(from), std::move(content), place});
}

void host_memory_goes(void* host, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  char* first = static_cast<char*>(host);
  for (auto copy = copies.begin(); copy != copies.end();) {
    bool inside = copy->host >= first && copy->host < first + bytes;
    if (inside) finish(*copy);
    copy = inside ? copies.erase(copy) : std::next(copy);
  }
}

}  // namespace simulated

// ------------------------------------------------------------------------------------ for lab/simulate/kernels.py

extern "C" {

/* Wait until everything that the stream's next kernel comes after is done. */
void simulated_settle(int device, void* handle) { simulated::settle(simulated::stream_of(device, handle)); }

/* The line of the program that the copies of this thread come from. */
void simulated_where(const char* text) { simulated::place = text; }

/* The end of the process: whatever was never waited for is looked at once. */
void simulated_finish() {
  std::lock_guard<std::mutex> guard(simulated::lock);
  for (const simulated::Copy& copy : simulated::copies)
    if (!copy.to_host) simulated::finish(copy);
  simulated::copies.clear();
}
}
