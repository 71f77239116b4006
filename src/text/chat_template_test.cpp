#include "text/chat_template.h"

#include <gtest/gtest.h>

#include "expect_error.h"
#include "scratch_folder.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

const std::vector<Message> kMessages = {{"system", "Be brief."}, {"user", "H\u00e9 \U0001f600 "}};

std::string render(std::string_view source, const std::vector<Message>& messages = kMessages) {
  return ChatTemplate(source, "chat.jinja").render(messages, {{"eos_token", "</s>"}});
}

std::string value_of(const std::string& expression) { return render("{{ " + expression + " }}"); }

// All expected texts are what Jinja gives, set up as Hugging Face does.
TEST(ChatTemplate, ChatMl) {
  EXPECT_EQ(
      render("{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + "
             "message['content'] + '<|im_end|>' + '\\n' }}{%- endfor %}{%- if "
             "add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"),
      "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nH\u00e9 \U0001f600 <|im_end|>\n"
      "<|im_start|>assistant\n");
}

TEST(ChatTemplate, BranchesForToolsAndImagesAreNotEntered) {
  EXPECT_EQ(render(R"({%- if tools %}{{ tools | tojson }}{%- elif messages[0].content is string %}
    {{- messages[0].content }}
{%- else %}
    {%- for part in messages[0].content %}{{ part | unheard_of }}{%- endfor %}
{%- endif %}
{%- if add_vision_id %}Picture {{ 1 }}: {% endif -%}
end)"),
            "Be brief.end");
}

TEST(ChatTemplate, WhiteSpace) {
  EXPECT_EQ(render("a\n  {% if true %}\n  b\n  {% endif %}\nc\n"), "a\n  b\nc");
  EXPECT_EQ(render("a \n {%- if true -%} \n b {%- endif -%} \n c"), "abc");
  EXPECT_EQ(render("a\n  {%+ if true %}b{% endif +%}\nc"), "a\n  b\nc");
  EXPECT_EQ(render("  {{ 1 }}  \n  {{- 2 -}}  \n x"), "  12x");
  EXPECT_EQ(render("a\n  {# note #}\nb {#- note -#} c"), "a\nbc");
  EXPECT_EQ(render("a\r\nb\r{% if true %}\r\nc{% endif %}"), "a\nb\nc");
  EXPECT_EQ(render("a\n\n"), "a\n");
}

TEST(ChatTemplate, Loops) {
  EXPECT_EQ(
      render(
          "{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.role }}{{ loop.last }};{% endfor %}"),
      "0userFalse;1systemTrue;");
  EXPECT_EQ(render("{% for m in messages if m.role != 'system' %}{{ m.role }}{{ loop.length }}{% "
                   "else %}none{% endfor %}"),
            "user1");
  EXPECT_EQ(render("{% for m in [] %}x{% else %}none{% endfor %}"), "none");
  EXPECT_EQ(render("{% for a, b in [[1, 2], (3, 4)] %}{{ a }}-{{ b }} {% endfor %}"), "1-2 3-4 ");
  EXPECT_EQ(render("{% for m in messages %}{{ loop.previtem is defined }}{{ loop.nextitem.role if "
                   "not loop.last }}{% endfor %}"),
            "FalseuserTrue");
}

TEST(ChatTemplate, NamesSetInALoopStayThereNamespacesDoNot) {
  EXPECT_EQ(
      render("{% set a = 1 %}{% set ns = namespace(n=0) %}{% for m in messages %}{% set a = 2 %}"
             "{% set ns.n = ns.n + 1 %}{% endfor %}{{ a }}{{ ns.n }}{% set b %}<{{ a }}>{% endset "
             "%}{{ b }}"),
      "12<1>");
}

TEST(ChatTemplate, Macros) {
  EXPECT_EQ(render("{% macro say(a, b='z', c=3) %}[{{ a }}{{ b }}{{ c }}{{ hidden }}]{% endmacro %}"
                   "{% for m in messages %}{% set hidden = 1 %}{{ say(m.role, c=4) }}{% endfor %}"),
            "[systemz4][userz4]");
}

TEST(ChatTemplate, Expressions) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"1 + 2 * 3 - -4", "11"},
      {"-7 // 2", "-4"},
      {"-7 % 3", "2"},
      {"7 // -2", "-4"},
      {"'a' ~ 1 ~ none ~ true", "a1NoneTrue"},
      {"'x' if false else 'y'", "y"},
      {"'x' if false", ""},
      {"not 1 == 2 and 'z'", "z"},
      {"'h\u00e9llo'[1:3]", "\u00e9l"},
      {"'abc'[::-1]", "cba"},
      {"'abc'[-2:]", "bc"},
      {"[1,2,3,4][::2] == [1,3]", "True"},
      {"messages[-1].role", "user"},
      {"messages[5] is defined", "False"},
      {"messages | length - 1", "1"},
      {"messages[1].content | length", "5"},
      {"messages[1].content | trim ~ '|'", "H\u00e9 \U0001f600|"},
      {"'a,b,c'.split(',')[-1]", "c"},
      {"'xxaxx'.strip('x')", "a"},
      {"'\\n a '.lstrip('\\n')", " a "},
      {"'  a '.rstrip()", "  a"},
      {"'ab'.startswith('a') and 'ab'.endswith('b')", "True"},
      {"'a-b'.replace('-', '+')", "a+b"},
      {"'a' in 'cat' and 3 not in [1, 2]", "True"},
      {"{'a': {'b': 5}}.a['b']", "5"},
      {"messages[0].get('name', 'none') ", "none"},
      {"'role' in messages[0]", "True"},
      {"missing | default('d')", "d"},
      {"'' | default('d')", ""},
      {"'' | default('d', true)", "d"},
      {"missing is undefined and tools is none and tools is defined", "True"},
      {"'\\x41\\u00e9\\t\\101\\q'", "A\u00e9\tA\\q"},
      {"\"it's\" ' one'", "it's one"},
      {"true == 1", "True"},
      {"'a' < 'b' and 2 >= 2", "True"},
      {"eos_token", "</s>"}};
  for (const auto& [expression, expected] : cases)
    EXPECT_EQ(value_of(expression), expected) << expression;
}

TEST(ChatTemplate, TextOfMessagesIsNotATemplate) {
  EXPECT_EQ(render("{{ messages[0].content }}", {{"user", "{{ 1 }}{% if %}"}}), "{{ 1 }}{% if %}");
  EXPECT_EQ(render("{{ messages[0].content }}", {{"user", "\xFF"}}), "\ufffd");
}

void expect_refused(std::string_view source, std::initializer_list<std::string_view> parts) {
  SCOPED_TRACE(source.substr(0, 80));
  const std::string message = expect_error(ErrorKind::unsupported, parts, [&] { render(source); });
  EXPECT_NE(message.find("chat.jinja, line "), std::string::npos) << message;
}

TEST(ChatTemplate, RefusesTagsWhenRead) {
  for (const char* tag :
       {"{% include 'x' %}", "{% block a %}", "{% raw %}", "{% endfor %}", "{% break %}"}) {
    expect_error(ErrorKind::unsupported, {tag, "chat.jinja, line 2"}, [&] {
      ChatTemplate(std::string("a\n{% if false %}") + tag + "{% endif %}{% endif %}", "chat.jinja");
    });
  }
}

TEST(ChatTemplate, RefusesByQuotingTheConstruct) {
  expect_refused("{{ messages | tojson }}", {"messages | tojson", "filter tojson"});
  expect_refused("{{ 'a' is divisibleby(3) }}", {"test divisibleby"});
  expect_refused("{{ 'a'.title() }}", {"'a'.title()", "method title"});
  expect_refused("{{ strftime_now('%d') }}", {"strftime_now('%d')", "function strftime_now"});
  expect_refused("{{ 1.5 }}", {"1.5", "integers"});
  expect_refused("{{ 4 / 2 }}", {"4 / 2", "operator /"});
  expect_refused("{{ 1 < 2 < 3 }}", {"chain of comparisons"});
  expect_refused("{{ missing.role }}", {"missing.role", "missing is undefined"});
  expect_refused("{{ 'a' + 1 }}", {"'a' + 1", "operands of +"});
  expect_refused("{{ messages }}", {"messages"});
  expect_refused("a\nb\n{{ raise_exception('no user') }}",
                 {"line 3", "the template objects: no user"});
  expect_refused("{% set missing.x = 1 %}", {"missing is not a namespace"});
  expect_refused("{{ 1 // 0 }}", {"1 // 0", "64 bits"});
  expect_refused("{{ 9223372036854775807 + 1 }}", {"64 bits"});
}

TEST(ChatTemplate, RefusesBrokenSyntax) {
  expect_refused("{{ 1 ", {"not closed with }}"});
  expect_refused("{{ 'a }}", {"string is not closed"});
  expect_refused("{# note", {"comment is not closed"});
  expect_refused("{% if true %}a", {"{% if true %}", "ends before endif"});
  expect_refused("{% for m messages %}{% endfor %}", {"{% for m messages %}", "expected \"in\""});
  expect_refused("{{ 1 2 }}", {"end of the tag"});
  expect_refused("{{ }}", {"expected an expression"});
  expect_refused("{{ a ? b }}", {"?", "unexpected character"});
  expect_refused("{{ (1 }}", {"chat.jinja"});
}

TEST(ChatTemplate, RefusesTextThatNoPromptCanHave) {
  expect_error(ErrorKind::invalid_argument, {"user message", "4194305", "4194304"}, [] {
    render("x", {{"user", std::string(4194305, 'a')}});
  });
}

TEST(ChatTemplate, HostileTemplatesAreBounded) {
  expect_refused("{{ " + std::string(5000, '(') + " }}", {"nested deeper"});
  std::string sum = "{{ 1";
  for (int i = 0; i < 5000; ++i) sum += "+1";
  expect_refused(sum + " }}", {"levels"});
  std::string blocks;
  for (int i = 0; i < 5000; ++i) blocks += "{% if true %}";
  expect_refused(blocks, {"nested deeper"});
  std::string doubling = "{% set a = 'xxxxxxxx' %}";
  for (int i = 0; i < 40; ++i) doubling += "{% set a = a + a %}";
  expect_refused(doubling, {"bytes"});
  std::string loops;
  for (int i = 0; i < 40; ++i) loops += "{% for a in messages %}";
  for (int i = 0; i < 40; ++i) loops += "{% endfor %}";
  expect_refused(loops, {"steps"});
  expect_refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {"macros call each other"});
  expect_refused("{% set ns = namespace() %}{% set ns.self = ns %}", {"namespace inside"});
  std::string lists = "{% set a = [] %}";
  for (int i = 0; i < 100; ++i) lists += "{% set a = [a] %}";
  expect_refused(lists, {"nested deeper"});
}

// Templates that once ran for ever or took gigabytes.
TEST(ChatTemplate, OneBudgetForEverything) {
  const auto refused = [](const std::string& name, const char* says) {
    SCOPED_TRACE(name);
    const auto file = source_dir() / "tests/data/jinja" / (name + ".jinja");
    expect_refused(ScratchFolder::read(file), {says});
  };
  refused("empty-loop", "steps");         // turns without a statement are steps
  refused("equal-dag", "bytes handled");  // lists that share a list, compared
  refused("mem-list", "bytes handled");   // a list of the same long text
  refused("trim-cost", "bytes handled");  // one character of a long text, again and again
  refused("loop-text", "items");          // a text taken apart
  refused("list-of-texts", "operands of *");
  refused("raise-esc", "the template objects");
  // A long text searched for another one takes time in proportion to both.
  const auto file = source_dir() / "tests/data/jinja/find-quad.jinja";
  EXPECT_EQ(render(ScratchFolder::read(file)), "x");
}

}  // namespace
}  // namespace orrery
