// The safety hook: an outside command that approves what goes in and what comes out. Its failure is
// never a pass.
//
// The command runs in /bin/sh with one more argument, the stage, and reads standard input:
//
//   prompt  One line of JSON with "stage", "prompt" and "negative_prompt".
//
//   frames  One line of JSON with "stage", "count", "height", "width" and "fps", then
//           count * height * width * 3 bytes of RGB.
//
// Standard input is a file: it can be read twice. The command prints one JSON object with
// "verdict", "approved" or "blocked", and perhaps "reason" on standard output, and exits with 0
// either way. Standard error is the user's. Nothing but this object is ever read as a verdict.
#pragma once

#include <functional>
#include <string>

#include "orrery/request.h"

namespace orrery {

inline constexpr const char* kGuardrailApproved = "approved";
inline constexpr const char* kGuardrailSkipped = "skipped: none configured";
inline constexpr const char* kGuardrailDeclined = "skipped: switched off";

class Guardrail {
 public:
  // An empty command: nothing is checked.
  Guardrail(std::string command, double timeout_seconds);

  bool is_set() const { return !command_.empty(); }
  // Each throws Error{blocked} when the verdict is "blocked", and Error{guardrail} when there is no
  // verdict: the command cannot start, exits with another status than 0, is killed, says anything
  // else, or takes longer than the timeout. `waiting` is called again and again until the
  // verdict is there; when it throws, the command is ended.
  using Waiting = std::function<void()>;
  void check_prompt(const Request& request, const Waiting& waiting) const;
  void check_frames(const Frames& frames, double fps, const Waiting& waiting) const;

 private:
  std::string command_;
  double timeout_seconds_;
};

}  // namespace orrery
