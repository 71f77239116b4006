// Timelines by events around what is queued.
#include "backend/timeline.h"

#include <cuda_runtime_api.h>

#include <optional>
#include <utility>

#include "cuda/context.h"
#include "cuda/cuda_backend.h"

namespace orrery::cuda {

namespace {

class TimedEvent {
 public:
  explicit TimedEvent(void* lane) {
    check(cudaEventCreate(&raw_));
    check(cudaEventRecord(raw_, static_cast<cudaStream_t>(lane)));
  }
  TimedEvent(TimedEvent&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  TimedEvent& operator=(TimedEvent&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~TimedEvent() {
    if (raw_ != nullptr) cudaEventDestroy(raw_);
  }
  // Milliseconds from `origin` to here; waits for this event.
  double since(const TimedEvent& origin) const {
    check(cudaEventSynchronize(raw_));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, origin.raw_, raw_));
    return ms;
  }

 private:
  cudaEvent_t raw_ = nullptr;
};

class EventTimeline final : public Timeline {
 public:
  explicit EventTimeline(const Backend& backend)
      : place_(place_of(backend)), origin_(place_.stream) {}

  void begin(std::string_view name, void* lane) override {
    marks_.push_back({lane, std::string(name), TimedEvent(lane), std::nullopt});
  }
  void end(void* lane) override { marks_.back().end.emplace(lane); }

  std::vector<Span> spans() override {
    std::vector<Span> spans;
    for (const Mark& mark : marks_) {
      if (!mark.end) continue;  // its work could not be queued
      spans.push_back({mark.lane == place_.link ? "link" : "compute", mark.name,
                       mark.begin.since(origin_), mark.end->since(origin_)});
    }
    return spans;
  }

 private:
  struct Mark {
    void* lane;
    std::string name;
    TimedEvent begin;
    std::optional<TimedEvent> end;
  };

  Place place_;
  TimedEvent origin_;
  std::vector<Mark> marks_;
};

}  // namespace

std::unique_ptr<Timeline> make_timeline(const Backend& backend) {
  return std::make_unique<EventTimeline>(backend);
}

}  // namespace orrery::cuda
