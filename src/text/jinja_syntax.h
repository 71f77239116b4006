// The syntax tree of a chat template and its parser. See chat_template.h for what is understood.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja_scanner.h"

namespace orrery::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct Expression {
  enum class Kind {
    text,     // text
    integer,  // integer
    boolean,  // integer 0 or 1
    none,
    name,         // text
    list,         // parts
    dict,         // parts: key, value, key, value
    member,       // parts[0].text
    index,        // parts[0][parts[1]]
    slice,        // parts[0][parts[1]:parts[2]:parts[3]], absent ones null
    call,         // parts[0](parts[1..], keywords)
    filter,       // parts[0] | text(parts[1..])
    test,         // parts[0] is text
    negation,     // not parts[0]
    minus,        // -parts[0]
    either,       // parts[0] or parts[1]
    both,         // parts[0] and parts[1]
    binary,       // parts[0] text parts[1]; text is the operator
    conditional,  // parts[0] if parts[1] else parts[2], which may be null
  };
  Kind kind;
  std::string text;
  int64_t integer = 0;
  std::vector<ExpressionPtr> parts;
  std::vector<std::pair<std::string, ExpressionPtr>> keywords;
  size_t begin = 0;  // the place in the source, for messages
  size_t end = 0;
  int depth = 1;
};

struct Statement;
using Block = std::vector<Statement>;

struct Statement {
  enum class Kind {
    text,       // text
    output,     // value
    condition,  // arms, tried in order; an arm without condition always holds
    loop,       // targets, value, condition (may be null), body, otherwise
    set,        // targets (one, or a member: target.member) = value, or body when value is null
    macro,      // text(parameters with defaults), body
  };
  struct Arm {
    ExpressionPtr condition;
    Block body;
  };
  Kind kind;
  std::string text;
  ExpressionPtr value;
  ExpressionPtr condition;
  std::vector<std::string> targets;
  std::string member;
  std::vector<Arm> arms;
  std::vector<std::pair<std::string, ExpressionPtr>> parameters;
  Block body;
  Block otherwise;
  size_t begin = 0;
  size_t end = 0;
};

Block parse(const Source& source);

}  // namespace orrery::jinja
