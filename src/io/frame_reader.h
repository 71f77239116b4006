// Decodes the pictures of one file with libav: the frames of a video or a still.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "io/image.h"

namespace orrery {

class FrameReader {
 public:
  enum class Contents { video, still };
  // Opens for `contents` only: a still is no video, nor a video a still. Playlists and anything
  // else that names further files or addresses are not opened. Errors begin with the file's name.
  FrameReader(const std::filesystem::path& file, Contents contents);
  // From memory, which must outlive the reader.
  FrameReader(std::span<const uint8_t> bytes, const std::string& name, Contents contents);
  ~FrameReader();
  FrameReader(const FrameReader&) = delete;
  FrameReader& operator=(const FrameReader&) = delete;

  struct Frame {
    Image image;  // upright
    double seconds = 0;
  };
  // The next frame in order of presentation, or nothing at the end. Damage and an end before the
  // last frame the container speaks of are errors.
  std::optional<Frame> next();
  // As the container says; 0 when it does not.
  double frame_rate() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace orrery
