// Variables of threads that outlast their thread's other ones.
#pragma once

namespace stand_in {

// A variable of each thread. Handlers of exit and destructors of a program's own thread variables may call
// the driver when the variables of that thread have been destroyed: they find a new one, which stays.
template <class T>
class ThreadVariable {
public:
  static T &get() {
    // Neither has a destructor, so that both are valid until the thread's memory goes.
    thread_local T *value = nullptr;
    thread_local bool ended = false;
    struct Guard {
      ~Guard() {
        delete value;
        value = nullptr;
        ended = true;
      }
    };
    if (!value) {
      value = new T();
      if (!ended)
        thread_local Guard guard;
    }
    return *value;
  }
};

} // namespace stand_in
