// Copies between host memory and the device through pinned buffers, a few threads filling or
// emptying them while the copy engine runs. Straight from a mapped file: no other host copy exists.
#pragma once

#include <memory>
#include <vector>

#include "cuda/context.h"

namespace orrery::cuda {

class Transfer {
 public:
  explicit Transfer(Context& context);
  ~Transfer();

  // Returns once `host` has been read; the device sees the bytes in stream order.
  void upload(void* device, const void* host, size_t bytes);
  // Returns once `host` holds the bytes.
  void download(void* host, const void* device, size_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Uploads on a stream of their own, one a lane at a time: Backend::upload_beside and await_upload.
class BesideUploads {
 public:
  explicit BesideUploads(Context& context) : context_(context) {}
  ~BesideUploads();
  BesideUploads(const BesideUploads&) = delete;
  BesideUploads& operator=(const BesideUploads&) = delete;

  // Begins when the context's stream has done what it has been given so far. Overlaps with what
  // comes later when `host` is pinned.
  void upload(int lane, void* device, const void* host, size_t bytes);
  // What the context's stream is given from here on sees the lane's upload.
  void await(int lane);

 private:
  Event new_event();

  Context& context_;
  Stream stream_ = nullptr;
  Event given_ = nullptr;    // what the context's stream had been given
  std::vector<Event> done_;  // by lane; null: no upload yet
};

}  // namespace orrery::cuda
