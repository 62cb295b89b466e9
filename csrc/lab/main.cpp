// _router run DIRECTORY [--lifeline]   runs the lab that DIRECTORY/config describes; says "ready" when it is up
// _router enter PID FD ARGV...         runs ARGV inside the namespace that process PID holds as descriptor FD
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>

#include "control.h"
#include "router.h"

namespace {

struct Configuration {
    struct Host {
        std::string name, address, address6;
    };
    std::vector<Host> hosts;
    lab::Sysctls sysctls;
    std::vector<std::string> commands;
    int mtu = 1500;
    uint64_t seed = 1;
};

Configuration read_configuration(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    Configuration configuration;
    std::string line;
    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string verb, key, value;
        words >> verb >> key;
        std::string address6;
        if (verb == "host" && words >> value >> address6)  // "-": no address of that family
            configuration.hosts.push_back({key, value == "-" ? "" : value, address6 == "-" ? "" : address6});
        else if (verb == "sysctl" && std::getline(words >> std::ws, value)) configuration.sysctls.emplace_back(key, value);
        else if (verb == "mtu") configuration.mtu = std::stoi(key);
        else if (verb == "seed") configuration.seed = std::stoull(key);
        else configuration.commands.push_back(line);
    }
    if (configuration.hosts.empty() || configuration.hosts.size() > 254)
        throw std::runtime_error("a lab has between 1 and 254 hosts");
    return configuration;
}

const char* raise_priority() {
    prctl(PR_SET_TIMERSLACK, 1000UL);
    sched_param param{};
    param.sched_priority = 10;
    if (sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &param) == 0) return "fifo";
    if (setpriority(PRIO_PROCESS, 0, -10) == 0) return "nice";
    return "normal";
}

int listen_on(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) throw std::runtime_error("the path is too long for a socket: " + path);
    std::strcpy(address.sun_path, path.c_str());
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    unlink(path.c_str());
    if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0 || listen(fd, 16) < 0)
        throw std::runtime_error("cannot listen on " + path + ": " + std::strerror(errno));
    return fd;
}

unsigned long long start_time() {  // field 22 of /proc/self/stat: differs from that of later processes of this id
    std::ifstream file("/proc/self/stat");
    std::string text;
    std::getline(file, text);
    std::istringstream words(text.substr(text.rfind(')') + 2));
    std::string word;
    for (int field = 3; field <= 22; ++field) words >> word;
    return std::stoull(word);
}

void write_state(const std::string& path, const std::vector<lab::HostDevice>& hosts, const char* priority) {
    std::ofstream file(path + ".new");
    file << "{\"pid\":" << getpid() << ",\"start\":" << start_time() << ",\"priority\":\"" << priority << "\",\"hosts\":[";
    for (size_t i = 0; i < hosts.size(); ++i) {
        file << (i ? "," : "") << "{\"name\":\"" << hosts[i].name << "\",\"address\":\"" << hosts[i].address
             << "\",\"address6\":\"" << hosts[i].address6 << "\",\"fd\":" << hosts[i].ns << ",\"inode\":" << hosts[i].inode << "}";
    }
    file << "]}\n";
    file.close();
    if (!file || std::rename((path + ".new").c_str(), path.c_str()) != 0)
        throw std::runtime_error("cannot write " + path);
}

int run(const std::string& directory, bool with_lifeline) {
    const Configuration configuration = read_configuration(directory + "/config");
    sigset_t handled;
    sigemptyset(&handled);
    for (int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&handled, signal);
    sigprocmask(SIG_BLOCK, &handled, nullptr);
    signal(SIGPIPE, SIG_IGN);
    const int signals = signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK);

    lab::gain_privilege();
    const int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    std::vector<lab::HostDevice> hosts;
    for (const auto& [name, address, address6] : configuration.hosts)
        hosts.push_back(lab::make_host(name, address, address6, configuration.mtu, configuration.sysctls));
    if (setns(home, CLONE_NEWNET) < 0) throw std::runtime_error("cannot leave the last host's namespace");

    lab::Network network(hosts.size(), configuration.seed);
    for (const std::string& command : configuration.commands) lab::apply(network, command);
    network.configured();
    const int control = listen_on(directory + "/control");
    lab::Router router(hosts, network);
    router.priority = raise_priority();
    write_state(directory + "/state.json", hosts, router.priority);
    std::cout << "ready" << std::endl;

    router.run(control, with_lifeline ? STDIN_FILENO : -1, signals);
    lab::close_doors(hosts);  // first: whoever enters later ends itself
    lab::kill_inside(hosts);
    for (const char* name : {"/control", "/state.json", "/config", "/router.log"}) unlink((directory + name).c_str());
    rmdir(directory.c_str());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const std::string verb = argc > 1 ? argv[1] : "";
        if (verb == "run" && argc >= 3) return run(argv[2], argc > 3 && std::strcmp(argv[3], "--lifeline") == 0);
        if (verb == "enter" && argc >= 5) lab::enter(std::atoi(argv[2]), std::atoi(argv[3]), argv + 4);
        std::cerr << "usage: _router run DIRECTORY [--lifeline] | _router enter PID FD ARGV..." << std::endl;
        return 2;
    } catch (const std::exception& error) {
        std::cerr << error.what() << std::endl;
        return 1;
    }
}
