// Chat templates: the part of Jinja that checkpoints write conversations with.
//
// Statements: if/elif/else, for (with an inline if, else, several targets and the loop variable),
// set (names, members of a namespace, blocks), macro. Expressions: names, strings, integers, true,
// false, none, lists, dicts, members, indices, slices, calls, filters, tests, "a if c else b", or,
// and, not, comparisons, in, + - * // % and ~. White space as Hugging Face sets it (trim_blocks,
// lstrip_blocks).
//
// Any other tag and any syntax error is refused when the template is read; any other filter, test,
// method, function or type of operand when it is reached, so that branches for tools or images that
// an ordinary conversation never enters may hold what they like. Messages quote the construct.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace orrery {

struct Message {
  std::string role;
  std::string content;
};

class ChatTemplate {
 public:
  using Named = std::pair<std::string, std::string>;

  // `origin` names the template in errors.
  ChatTemplate(std::string_view source, const std::string& origin);
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  // With add_generation_prompt true, add_vision_id false, tools and documents none, and `variables`
  // (eos_token and the like) as strings. Invalid UTF-8 in messages is replaced as Tokenizer does.
  std::string render(const std::vector<Message>& conversation,
                     const std::vector<Named>& variables) const;

 private:
  struct Parsed;
  std::unique_ptr<Parsed> parsed_;
};

}  // namespace orrery
