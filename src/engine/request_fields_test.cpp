// Every field is in flags, JSON, report, metadata and fingerprint, and a prompt file is a request.
#include "engine/request_fields.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "engine/fingerprint.h"
#include "engine/report.h"
#include "expect_error.h"
#include "scratch_folder.h"

namespace orrery {
namespace {

// A value of the field that differs from `old`.
Json another(const FieldInfo& field, const Json& old) {
  const auto differs = [&](const Json& value) { return value.dump() != old.dump(); };
  switch (field.type) {
    case FieldType::integer: {
      const Json low(static_cast<int64_t>(std::isfinite(field.least) ? field.least : 3));
      return differs(low) ? low : Json(low.as_int() + 1);
    }
    case FieldType::number: return differs(Json(7.5)) ? Json(7.5) : Json(8.5);
    case FieldType::mark:
    case FieldType::on_off: return Json(old.is_boolean() ? !old.as_bool() : true);
    case FieldType::choice: {
      for (std::string_view name : field.choices) {
        if (Json value{std::string(name)}; differs(value)) return value;
      }
      break;
    }
    case FieldType::integers: return Json::array({Json(2), Json(3)});
    case FieldType::interval: return Json::array({Json(10.0), Json(20.0)});
    case FieldType::hint_numbers: return Json::object().set("edge", 0.5);
    case FieldType::adapters:
      return Json::array({Json::object().set("file", "a.safetensors").set("scale", 0.5)});
    default: break;
  }
  return Json("changed");
}

Request full_request() {
  Request request;
  request.action = ActionRequest{};
  request.transfer = TransferRequest{};
  request.transfer->controls = {{ControlHint::edge, {}}, {ControlHint::blur, {}}};
  return request;
}

Settings some_settings() {
  Settings settings;
  settings.schedule.sigmas = {1.0f, 0.0f};
  settings.schedule.timesteps = {1000.0f};
  return settings;
}

// The words that say this value on the command line.
std::vector<std::string> words_of(const FieldInfo& field, const Json& value) {
  if (field.type == FieldType::hint_numbers) return {"edge=0.5"};
  if (field.type == FieldType::adapters) return {"a.safetensors:0.5"};
  if (value.is_array()) {
    std::vector<std::string> words;
    for (const Json& item : value.items()) words.push_back(item.dump());
    return words;
  }
  return {value.is_string() ? value.as_string() : value.dump()};
}

bool reads_a_file(const FieldInfo& field) {
  return field.type == FieldType::file || field.type == FieldType::hint_files;
}

TEST(RequestFields, EveryChangeIsSeenEverywhere) {
  const Request before = full_request();
  const EngineOptions options;
  const Settings settings = some_settings();
  for (const Field<Request>& row : request_table()) {
    if (reads_a_file(row)) continue;
    SCOPED_TRACE(row.name);
    const Json value = another(row, row.write(before));
    ASSERT_NO_THROW(check_value(row, value, "value"));
    Request after = before;
    row.read(after, value);
    EXPECT_EQ(row.write(after).dump(), value.dump());
    // Nothing else changes.
    const Json was = fields_json(before), is = fields_json(after);
    for (const auto& [name, old] : was.members()) {
      if (name == row.name) continue;
      EXPECT_EQ(is.at(name).dump(), old.dump()) << name;
    }
    // Report and metadata say it, and that it was given.
    const Json report = settings_json(after, settings);
    EXPECT_EQ(report.at(row.name).dump(), value.dump());
    EXPECT_NE(report.at("given").dump().find('"' + std::string(row.name) + '"'), std::string::npos);
    const Json metadata = metadata_json(after, settings, {});
    EXPECT_EQ(metadata.at(row.name).dump(), value.dump());
    EXPECT_NE(fingerprint(after, settings, options), fingerprint(before, settings, options));
    // A flag says the same.
    Draft draft;
    draft.set(row, words_of(row, value), flag_of(row));
    EXPECT_EQ(draft.find(row.name)->json->dump(), value.dump());
  }
}

TEST(RequestFields, EveryEngineOptionIsInTheFingerprint) {
  const EngineOptions before;
  for (const Field<EngineOptions>& row : engine_table()) {
    SCOPED_TRACE(row.name);
    const Json value = another(row, row.write(before));
    EngineOptions after = before;
    row.read(after, value);
    EXPECT_EQ(row.write(after).dump(), value.dump());
    EXPECT_NE(fingerprint({}, some_settings(), after), fingerprint({}, some_settings(), before));
    Draft draft;
    draft.set(row, words_of(row, value), flag_of(row));
    EXPECT_EQ(draft.find(row.name)->json->dump(), value.dump());
  }
}

// Names, aliases and flags mean one thing each.
TEST(RequestFields, NamesAreUnique) {
  std::set<std::string> names;
  for (const auto* fields : {&request_fields(), &engine_fields()}) {
    for (const FieldInfo& field : *fields) {
      EXPECT_TRUE(names.insert(std::string(field.name)).second) << field.name;
      EXPECT_TRUE(names.insert(flag_of(field)).second) << field.name;
      EXPECT_FALSE(field.help.empty()) << field.name;
      EXPECT_FALSE(field.otherwise.empty()) << field.name;
    }
  }
}

TEST(RequestFields, LibraryCallersAreHeldToTheSameLimits) {
  Request request;
  request.num_frames = 5001;
  expect_error(ErrorKind::invalid_argument, {"num_frames is 5001", "5000"},
               [&] { check_fields(request_table(), request); });
  request.num_frames.reset();
  request.guidance_scale = NAN;
  expect_error(ErrorKind::invalid_argument, {"guidance_scale"},
               [&] { check_fields(request_table(), request); });
}

TEST(Draft, NumbersAreDecimalAndInRange) {
  const auto seed = [](const char* word) {
    Draft draft;
    draft.set(*find_field(request_fields(), "seed"), {word}, "--seed");
    return draft.integer("seed");
  };
  EXPECT_EQ(seed("010"), 10);
  EXPECT_EQ(seed("-1"), -1);
  EXPECT_EQ(seed("-9223372036854775808"), INT64_MIN);
  EXPECT_EQ(seed("18446744073709551615"), -1);  // the same 64 bits
  for (const char* word :
       {"0x10", "1.5", "", "1e3", "18446744073709551616", "-9223372036854775809"})
    expect_error(ErrorKind::invalid_argument, {"--seed"}, [&] { seed(word); });
}

Draft only(std::string_view text, const char* file = "request.json") {
  std::vector<Draft> drafts = parse_requests(text, file);
  EXPECT_EQ(drafts.size(), 1u);
  return drafts.front();
}

void refused(std::string_view text, std::initializer_list<std::string_view> says) {
  expect_error(ErrorKind::invalid_argument, says, [&] { parse_requests(text, "r.json"); });
}

// B2: the public names.
TEST(PromptFile, TakesAPublicSample) {
  const Draft draft = only(R"({"model_mode": "forward_dynamics", "vision_path": "a.png",
    "action_path": "b.json", "image_size": 480, "fps": 30, "prompt": "A lake.",
    "action_chunk_size": 60, "num_steps": 30, "guidance": 1.0, "shift": 5.0, "seed": 0,
    "domain_name": "camera_pose"})",
                           "folder/sample.json");
  EXPECT_EQ(draft.text("action_mode"), "forward_dynamics");
  EXPECT_EQ(draft.integer("resolution_tier"), 480);
  EXPECT_EQ(draft.integer("num_inference_steps"), 30);
  EXPECT_EQ(draft.find("guidance_scale")->json->as_double(), 1);
  EXPECT_EQ(draft.find("flow_shift")->json->as_double(), 5);
  EXPECT_EQ(draft.folders.at("vision_path"), "folder");
}

TEST(PromptFile, TakesATransferSpecification) {
  const Draft draft =
      only(R"({"name": "transfer_wsm", "model_mode": "video2video", "prompt": "A road.",
    "resolution": "720", "num_frames": 100, "fps": 10,
    "wsm": {"control_path": "control_wsm.mp4", "control_weight": 2}, "edge": true})");
  EXPECT_EQ(draft.integer("height"), 720);
  EXPECT_EQ(draft.integer("width"), 1280);
  EXPECT_EQ(draft.find("control")->json->dump(), R"({"wsm":"control_wsm.mp4","edge":true})");
  EXPECT_EQ(draft.find("control_weight")->json->dump(), R"({"wsm":2})");
  EXPECT_EQ(draft.text("name"), "transfer_wsm");
}

// B1, B3, B4.
TEST(PromptFile, IsReadByContent) {
  const Draft null =
      only(R"({"model_mode": "text2image", "prompt": "A", "negative_prompt": null})");
  EXPECT_FALSE(null.has("negative_prompt"));
  EXPECT_EQ(null.integer("num_frames"), 1);
  for (const char* file : {"a.txt", "a.JSON", "a", "-"})
    EXPECT_EQ(only(R"({"prompt": "A red circle"})", file).text("prompt"), "A red circle");
  EXPECT_EQ(only("\xEF\xBB\xBF"
                 "A circle.\n",
                 "a.txt")
                .text("prompt"),
            "A circle.");
  EXPECT_EQ(only(std::string_view("\xFF\xFE"
                                  "A\0\xE9\0",
                                  6),
                 "a.txt")
                .text("prompt"),
            "A\u00e9");
  EXPECT_EQ(only(std::string_view("\xFE\xFF"
                                  "\0A\xD8\x3D\xDE\x00",
                                  8),
                 "a.txt")
                .text("prompt"),
            "A\U0001F600");
  EXPECT_EQ(only("[wide shot] A cat", "a.txt").text("prompt"), "[wide shot] A cat");
  // A structured caption is taken as it is written.
  const std::string caption = R"({"cinematography": {"framing": "wide"}, "fps": 5.0})";
  EXPECT_EQ(only(caption).text("prompt"), caption);
  EXPECT_EQ(parse_requests("{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n", "a.jsonl").size(), 2u);
  EXPECT_EQ(parse_requests(R"([{"prompt": "a"}, "b", {"prompt": "c"}])", "a.json").size(), 3u);
}

TEST(PromptFile, RefusesWhatItDoesNotKnow) {
  refused(R"({"prompt": "A", "negative_promt": "b"})",
          {"negative_promt", "did you mean negative_prompt?"});
  refused(R"({"prompt": "A", "negative_prompt": 3})", {"negative_prompt", "must be text"});
  refused(R"({"prompt": "A", "seed": "7"})", {"seed", "whole number"});
  refused(R"({"prompt": "A", "num_frames": 0})", {"r.json: num_frames must be at least 1"});
  refused(R"({"prompt": "A", "num_steps": 3, "num_inference_steps": 4})", {"a second time"});
  refused(R"({"prompt": "A", "model_mode": "text2movie"})", {"text2movie", "text2video"});
  refused(R"({"prompt": "A", "model_mode": "text2image", "num_frames": 5})", {"text2image"});
  refused(std::string_view("A\0B", 3), {"NUL"});
  refused("caf\xE9", {"UTF-8"});
  refused(" \n", {"empty"});
}

TEST(Draft, FlagsWinAndAreNamed) {
  Draft flags;
  flags.set(*find_field(request_fields(), "seed"), {"4"}, "--seed");
  const auto sentences = flags.fill_from(only(R"({"prompt": "A", "seed": 3, "fps": 10})"));
  ASSERT_EQ(sentences.size(), 1u);
  EXPECT_EQ(sentences[0], "--seed 4 is used instead of 3 (request.json: seed)");
  EXPECT_EQ(flags.integer("seed"), 4);
  EXPECT_EQ(flags.text("prompt"), "A");
  const Request request = request_of(flags);
  EXPECT_EQ(request.seed, 4);
  EXPECT_EQ(request.fps, 10);
}

}  // namespace
}  // namespace orrery
