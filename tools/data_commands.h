// `satchel data`: a data set as files that other programs read.
#pragma once

namespace CLI {
class App;
}

namespace satchel::tool {

void add_data_command(CLI::App& app);

}  // namespace satchel::tool
