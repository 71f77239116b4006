// Prompt text as the public pipeline assembles it: templates, conversation, chat template, ids.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace orrery {

// Which of the public pipeline's system prompts (docs/text.md).
enum class SystemPrompt { none, image, video, transfer };
std::string_view text_of(SystemPrompt prompt);

struct PromptSettings {
  int64_t num_frames = 189;
  int64_t height = 720;
  int64_t width = 1280;
  double fps = 24;
  bool duration_template = true;
  bool resolution_template = true;
};

// Section 4.2; the negative text receives the inverse sentences.
std::string positive_text(std::string_view prompt, const PromptSettings& settings);
std::string negative_text(std::string_view prompt, const PromptSettings& settings);

// Section 4.1: a prompt that asks to follow the controls of these hints.
std::string emphasized_text(std::string_view prompt, const std::vector<std::string>& hints);

// Section 4.4: the JSON caption of an action run, byte for byte as Python's json.dumps.
struct ActionCaption {
  std::string prompt;
  std::optional<std::string> view_point = "ego_view";  // an unknown one is left out
  int64_t chunk_size = 0;
  double fps = 24;
  int64_t canvas_height = 0;
  int64_t canvas_width = 0;
};
std::string action_text(const ActionCaption& caption);

// A system message, unless it is none, and the text as the user's message.
std::vector<Message> conversation_of(SystemPrompt system, std::string text);

// Renders the conversation with the checkpoint's chat template (with generation prompt). What a
// template asks beyond the Jinja of chat_template.h is refused by naming it.
std::string render_chat(const Tokenizer& tokenizer, const std::vector<Message>& conversation);

// Conversation -> rendered text -> ids, then eos and <|vision_start|>. Nothing is cut.
std::vector<int64_t> prompt_ids(const Tokenizer& tokenizer,
                                const std::vector<Message>& conversation);

// The ids prompt_ids appends, which the limit does not count.
inline constexpr int64_t kAppendedIds = 2;
inline constexpr int64_t kMaxPromptIds = 4096;
// Refuses what prompt_ids made if it is longer than the model was made for; `name` is the flag or
// field that the prompt came from. Cutting it silently would drop the sentences at its end.
void require_prompt_fits(const std::vector<int64_t>& ids, std::string_view name);

}  // namespace orrery
